// A model in two parts: strings and features on the CPU, in pieces of the rows by several threads, and the network on a
// device. The front writes where the device copies from; nothing is copied in between.
#pragma once

#include "core.h"
#include "workers.h"

namespace native {

class SplitGraph : public Scorer {
 public:
  // `folder`: with front.onnx and core.onnx.
  SplitGraph(const ort::Api& api, ort::Env* env, const std::string& folder, const Settings& settings, std::unique_ptr<Device> device)
      : api_(api),
        settings_(settings),
        core_(api, env, folder + "/core.onnx", settings, std::move(device)),
        workers_(settings.split.workers) {
    api_.call(ort::Api::kCreateCpuMemoryInfo, 0 /* of a device */, 0 /* default */, &memory_);
    auto keep = api_.own(ort::Api::kReleaseMemoryInfo, memory_);
    api_.call(ort::Api::kDefaultAllocator, &allocator_);
    front_ = open_session(api_, env, folder + "/front.onnx", 1);
    keep.release();
    for (const Column& column : settings_.inputs) input_names_.push_back(column.name.c_str());
    for (const Column& column : settings_.split.inner) inner_names_.push_back(column.name.c_str());
  }
  SplitGraph(const SplitGraph&) = delete;
  SplitGraph& operator=(const SplitGraph&) = delete;
  ~SplitGraph() override {
    api_.release(ort::Api::kReleaseSession, front_);
    api_.release(ort::Api::kReleaseMemoryInfo, memory_);
  }

  const Settings& settings() const override { return settings_; }

  void run(const std::vector<const Reading*>& batch, int64_t rows, const Use& use) override {
    Joined joined(batch);
    std::vector<Answer> answers;
    std::vector<std::vector<char>> kept(settings_.split.outer.size());  // of batches larger than the largest size
    for (const Column& column : settings_.split.outer) answers.push_back(empty(column, rows));
    for (int64_t begin = 0; begin < rows; begin += core_.most()) {
      int64_t count = std::min(core_.most(), rows - begin);
      size_t size = core_.size_for(count);
      run_front(joined, begin, count, size);
      core_.run(size, count);
      for (size_t place = 0; place < answers.size(); ++place) {
        const char* found = core_.output(size, place);
        if (rows <= core_.most()) {
          answers[place].data = found;
        } else {
          kept[place].insert(kept[place].end(), found, found + size_t(count) * answers[place].row_bytes);
          answers[place].data = kept[place].data();
        }
      }
    }
    use(answers);
  }

 private:
  static Answer empty(const Column& column, int64_t rows) {
    Answer made;
    made.dtype = column.dtype;
    made.dims = shape_of(column, rows);
    made.row_bytes = column.width * column.bytes;
    made.data = "";
    return made;
  }

  void run_front(const Joined& joined, int64_t begin, int64_t count, size_t size) {
    const Split& split = settings_.split;
    int64_t most = std::min<int64_t>(int64_t(split.workers), (count + split.piece_rows - 1) / split.piece_rows);
    int64_t pieces = std::max<int64_t>(most, 1);
    workers_.each(size_t(pieces), [&](size_t piece) {
      int64_t from = count * int64_t(piece) / pieces, to = count * int64_t(piece + 1) / pieces;
      run_piece(joined, begin, from, to, size);
    });
  }

  // The rows from `from` to `to` of the batch that starts at `begin`.
  void run_piece(const Joined& joined, int64_t begin, int64_t from, int64_t to, size_t size) {
    std::vector<std::vector<char>> numbers(settings_.inputs.size());
    std::vector<Value> values;
    std::vector<const ort::Value*> inputs;
    for (size_t place = 0; place < settings_.inputs.size(); ++place) {
      const Column& column = settings_.inputs[place];
      values.push_back(joined.input(api_, memory_, allocator_, column, place, begin + from, begin + to, numbers[place]));
      inputs.push_back(values.back().get());
    }
    std::vector<ort::Value*> outputs;
    for (size_t place = 0; place < settings_.split.inner.size(); ++place) {
      const Column& column = settings_.split.inner[place];
      char* start = core_.input(size, place) + size_t(from) * column.width * column.bytes;
      values.push_back(tensor_over(api_, memory_, column, to - from, start));
      outputs.push_back(values.back().get());
    }
    api_.call(ort::Api::kRun, front_, static_cast<const void*>(nullptr), input_names_.data(), inputs.data(), inputs.size(),
              inner_names_.data(), inner_names_.size(), outputs.data());
  }

  const ort::Api& api_;
  const Settings settings_;
  Core core_;
  Workers workers_;
  ort::Session* front_ = nullptr;
  ort::MemoryInfo* memory_ = nullptr;
  ort::Allocator* allocator_ = nullptr;
  std::vector<const char*> input_names_, inner_names_;
};

}  // namespace native
