// The core of a model on a device: memory that stays in its place, and for each size of batch a run that is prepared once.
#pragma once

#include <mutex>
#include <utility>

#include "device.h"
#include "graph.h"

namespace native {

class Core {
 public:
  Core(const ort::Api& api, ort::Env* env, const std::string& path, const Settings& settings, std::unique_ptr<Device> device)
      : api_(api), split_(settings.split), device_(std::move(device)) {
    static std::mutex one_at_a_time;  // while a graph is captured, nobody else in the process may take memory
    std::lock_guard<std::mutex> lock(one_at_a_time);
    device_->use();
    try {
      memory_ = device_->memory(api_);
      take_memory();
      bool graphs = split_.graphs && device_->has_graphs();
      if (!graphs || !prepare(env, path, settings.threads)) {
        open(env, path, settings.threads, false);
        run_all();
      }
    } catch (...) {
      close();
      throw;
    }
  }
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;
  ~Core() { close(); }

  int64_t most() const { return split_.sizes.back(); }

  // The place of the smallest size that has room for these rows.
  size_t size_for(int64_t rows) const {
    return size_t(std::lower_bound(split_.sizes.begin(), split_.sizes.end(), rows) - split_.sizes.begin());
  }

  // Where the host writes an inner tensor of a batch of this size.
  char* input(size_t size, size_t place) { return host_in_ + offset(split_.inner, size, place); }
  // Where the host reads an output.
  const char* output(size_t size, size_t place) const { return host_out_ + offset(split_.outer, size, place); }

  // Runs a batch whose first `rows` rows are written; the last one fills it up.
  void run(size_t size, int64_t rows) {
    for (size_t place = 0; place < split_.inner.size(); ++place) {
      size_t row = row_bytes(split_.inner[place]);
      char* start = input(size, place);
      for (int64_t at = rows; at < split_.sizes[size]; ++at) std::memcpy(start + size_t(at) * row, start + size_t(rows - 1) * row, row);
    }
    device_->use();
    run(size);
  }

 private:
  struct Run {
    ort::IoBinding* binding = nullptr;
    ort::RunOptions* options = nullptr;
    std::vector<Value> values;
  };

  static size_t row_bytes(const Column& column) { return column.width * column.bytes; }

  // Tensors stand one behind the other, so that one copy moves them all.
  size_t offset(const std::vector<Column>& columns, size_t size, size_t place) const {
    size_t at = 0;
    for (size_t before = 0; before < place; ++before) {
      at += (size_t(split_.sizes[size]) * row_bytes(columns[before]) + 255) / 256 * 256;
    }
    return at;
  }
  size_t bytes(const std::vector<Column>& columns, size_t size) const { return offset(columns, size, columns.size()); }

  void take_memory() {
    size_t largest = split_.sizes.size() - 1;
    size_t in = bytes(split_.inner, largest), out = bytes(split_.outer, largest);
    in_ = static_cast<char*>(device_->take(in));
    out_ = static_cast<char*>(device_->take(out));
    host_in_ = static_cast<char*>(device_->take_host(in));
    host_out_ = static_cast<char*>(device_->take_host(out));
    std::memset(host_in_, 0, in);
    std::memset(host_out_, 0, out);
  }

  // With graphs. Some cores cannot have them: a node for the CPU among others, or one that waits for the device.
  bool prepare(ort::Env* env, const std::string& path, int threads) {
    try {
      open(env, path, threads, true);
      run_all();
      return true;
    } catch (const std::exception& error) {
      std::string text = std::string("without CUDA graphs: ") + error.what();
      if (TRITONSERVER_Error* failed = TRITONSERVER_LogMessage(triton::kLogWarning, __FILE__, __LINE__, text.c_str())) {
        TRITONSERVER_ErrorDelete(failed);
      }
      close_session();
      return false;
    }
  }

  void open(ort::Env* env, const std::string& path, int threads, bool graphs) {
    session_ = open_session(
        api_, env, path, threads,
        [&](ort::SessionOptions* options) { device_->configure(api_, options, split_.arena_bytes, graphs); });
    runs_.resize(split_.sizes.size());
    for (size_t size = 0; size < runs_.size(); ++size) bind(size, graphs);
  }

  void bind(size_t size, bool graphs) {
    using A = ort::Api;
    Run& run = runs_[size];
    api_.call(A::kCreateIoBinding, session_, &run.binding);
    api_.call(A::kCreateRunOptions, &run.options);
    if (device_->has_graphs()) {
      api_.call(A::kAddRunConfigEntry, run.options, "disable_synchronize_execution_providers", "1");
      std::string graph = graphs ? std::to_string(size + 1) : "-1";
      api_.call(A::kAddRunConfigEntry, run.options, "gpu_graph_id", graph.c_str());
    }
    int64_t rows = split_.sizes[size];
    for (size_t place = 0; place < split_.inner.size(); ++place) {
      const Column& column = split_.inner[place];
      run.values.push_back(tensor_over(api_, memory_, column, rows, in_ + offset(split_.inner, size, place)));
      api_.call(A::kBindInput, run.binding, column.name.c_str(), static_cast<const ort::Value*>(run.values.back().get()));
    }
    for (size_t place = 0; place < split_.outer.size(); ++place) {
      const Column& column = split_.outer[place];
      run.values.push_back(tensor_over(api_, memory_, column, rows, out_ + offset(split_.outer, size, place)));
      api_.call(A::kBindOutput, run.binding, column.name.c_str(), static_cast<const ort::Value*>(run.values.back().get()));
    }
  }

  // The first run of a size chooses kernels and captures its graph. The largest comes first: it takes the memory.
  void run_all() {
    for (size_t size = runs_.size(); size-- != 0;) run(size);
  }

  void run(size_t size) {
    device_->copy_in(in_, host_in_, bytes(split_.inner, size));
    api_.call(ort::Api::kRunWithBinding, session_, static_cast<const ort::RunOptions*>(runs_[size].options),
              static_cast<const ort::IoBinding*>(runs_[size].binding));
    device_->copy_out(host_out_, out_, bytes(split_.outer, size));
    device_->wait();
  }

  void close_session() {
    for (Run& run : runs_) {
      api_.release(ort::Api::kReleaseIoBinding, run.binding);
      api_.release(ort::Api::kReleaseRunOptions, run.options);
    }
    runs_.clear();
    api_.release(ort::Api::kReleaseSession, std::exchange(session_, nullptr));
  }

  void close() {
    try {
      device_->use();
    } catch (const std::exception&) {  // it is gone; so is its memory
      return;
    }
    close_session();
    api_.release(ort::Api::kReleaseMemoryInfo, memory_);
    if (in_ != nullptr) device_->give(in_);
    if (out_ != nullptr) device_->give(out_);
    if (host_in_ != nullptr) device_->give_host(host_in_);
    if (host_out_ != nullptr) device_->give_host(host_out_);
  }

  const ort::Api& api_;
  const Split split_;
  std::unique_ptr<Device> device_;
  ort::MemoryInfo* memory_ = nullptr;
  ort::Session* session_ = nullptr;
  std::vector<Run> runs_;
  char *in_ = nullptr, *out_ = nullptr, *host_in_ = nullptr, *host_out_ = nullptr;
};

}  // namespace native
