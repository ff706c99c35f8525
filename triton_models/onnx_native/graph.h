// The bundle's ONNX graph in a session of its own, and one run of it for several requests.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "joining.h"

namespace native {

// An output of a whole batch.
struct Answer {
  int dtype = 0;
  std::vector<int64_t> dims;
  size_t row_bytes = 0;               // of numbers
  const char* data = nullptr;         // of numbers
  std::vector<std::string> texts;     // as they go over the wire, a row each
};

// A model that answers several requests with one run.
class Scorer {
 public:
  using Use = std::function<void(const std::vector<Answer>&)>;
  virtual ~Scorer() = default;
  virtual const Settings& settings() const = 0;
  // Calls `use` with the outputs, in the order of the settings, while they are there.
  virtual void run(const std::vector<const Reading*>& batch, int64_t rows, const Use& use) = 0;
};

// `configure`: adds what the session needs beside the threads.
inline ort::Session* open_session(const ort::Api& api, ort::Env* env, const std::string& path, int threads,
                                  const std::function<void(ort::SessionOptions*)>& configure = [](ort::SessionOptions*) {}) {
  using A = ort::Api;
  ort::SessionOptions* options = nullptr;
  api.call(A::kCreateSessionOptions, &options);
  auto keep = api.own(A::kReleaseSessionOptions, options);
  api.call(A::kSetIntraOpThreads, options, threads);
  api.call(A::kSetInterOpThreads, options, 1);
  api.call(A::kAddConfigEntry, options, "session.intra_op.allow_spinning", "0");
  configure(options);
  ort::Session* session = nullptr;
  api.call(A::kCreateSession, env, path.c_str(), static_cast<const ort::SessionOptions*>(options), &session);
  return session;
}

class Graph : public Scorer {
 public:
  Graph(const ort::Api& api, ort::Env* env, const std::string& path, const Settings& settings)
      : api_(api), settings_(settings) {
    api_.call(ort::Api::kCreateCpuMemoryInfo, 0 /* of a device */, 0 /* default */, &memory_);
    auto keep = api_.own(ort::Api::kReleaseMemoryInfo, memory_);
    api_.call(ort::Api::kDefaultAllocator, &allocator_);
    session_ = open_session(api_, env, path, settings.threads);
    keep.release();
    for (const Column& column : settings_.inputs) input_names_.push_back(column.name.c_str());
    for (const std::string& name : settings_.outputs) output_names_.push_back(name.c_str());
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() override {
    api_.release(ort::Api::kReleaseSession, session_);
    api_.release(ort::Api::kReleaseMemoryInfo, memory_);
  }

  const Settings& settings() const override { return settings_; }

  void run(const std::vector<const Reading*>& batch, int64_t rows, const Use& use) override {
    Joined joined(batch);
    std::vector<std::vector<char>> numbers(settings_.inputs.size());
    std::vector<Value> values;
    std::vector<const ort::Value*> inputs;
    for (size_t place = 0; place < settings_.inputs.size(); ++place) {
      values.push_back(
          joined.input(api_, memory_, allocator_, settings_.inputs[place], place, 0, rows, numbers[place]));
      inputs.push_back(values.back().get());
    }
    std::vector<ort::Value*> outputs(output_names_.size(), nullptr);
    api_.call(ort::Api::kRun, session_, static_cast<const void*>(nullptr), input_names_.data(), inputs.data(),
              inputs.size(), output_names_.data(), output_names_.size(), outputs.data());
    std::vector<Value> kept;
    for (ort::Value* output : outputs) kept.emplace_back(api_, output);
    std::vector<Answer> answers;
    for (const Value& output : kept) answers.push_back(read(output, rows));
    use(answers);
  }

 private:
  Answer read(const Value& output, int64_t rows) {
    using A = ort::Api;
    Answer answer;
    ort::TypeAndShape* info = nullptr;
    api_.call(A::kTypeAndShape, static_cast<const ort::Value*>(output.get()), &info);
    auto keep = api_.own(A::kReleaseTypeAndShape, info);
    const ort::TypeAndShape* seen = info;
    int element = 0;
    size_t dims = 0, count = 0;
    api_.call(A::kElementType, seen, &element);
    api_.call(A::kDimsCount, seen, &dims);
    answer.dims.resize(dims);
    api_.call(A::kDims, seen, answer.dims.data(), dims);
    api_.call(A::kElementCount, seen, &count);
    if (dims == 0 || answer.dims[0] != rows) {
      throw std::runtime_error(std::to_string(rows) + " rows were answered with " +
                               (dims ? std::to_string(answer.dims[0]) : std::string("a single value")));
    }
    size_t width = rows ? count / size_t(rows) : 0;
    if (element == ort::kString) {
      answer.dtype = triton::kBytes;
      answer.texts = texts(output, size_t(rows), width);
      return answer;
    }
    size_t bytes = 0;
    switch (element) {
      case ort::kFloat: answer.dtype = triton::kFloat, bytes = 4; break;
      case ort::kDouble: answer.dtype = triton::kDouble, bytes = 8; break;
      case ort::kInt64: answer.dtype = triton::kInt64, bytes = 8; break;
      case ort::kInt32: answer.dtype = triton::kInt32, bytes = 4; break;
      case ort::kInt8: answer.dtype = triton::kInt8, bytes = 1; break;
      case ort::kUInt8: answer.dtype = triton::kUInt8, bytes = 1; break;
      case ort::kBool: answer.dtype = triton::kBool, bytes = 1; break;
      default: throw std::runtime_error("an output has element type " + std::to_string(element) + ", which is not known here");
    }
    void* data = nullptr;
    api_.call(A::kTensorData, output.get(), &data);
    answer.data = static_cast<const char*>(data);
    answer.row_bytes = width * bytes;
    return answer;
  }

  std::vector<std::string> texts(const Value& output, size_t rows, size_t width) {
    const ort::Value* value = output.get();
    size_t total = 0, count = rows * width;
    api_.call(ort::Api::kStringsLength, value, &total);
    std::string all(total + 1, '\0');
    std::vector<size_t> starts(count + 1, total);
    api_.call(ort::Api::kStringsContent, value, static_cast<void*>(all.data()), total, starts.data(), count);
    starts[count] = total;
    std::vector<std::string> found(rows);
    for (size_t index = 0; index < count; ++index) {
      uint32_t length = uint32_t(starts[index + 1] - starts[index]);
      std::string& row = found[index / width];
      row.append(reinterpret_cast<const char*>(&length), 4);
      row.append(all, starts[index], length);
    }
    return found;
  }

  const ort::Api& api_;
  const Settings settings_;
  ort::Session* session_ = nullptr;
  ort::MemoryInfo* memory_ = nullptr;
  ort::Allocator* allocator_ = nullptr;
  std::vector<const char*> input_names_, output_names_;
};

}  // namespace native
