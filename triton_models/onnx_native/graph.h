// The bundle's ONNX graph in a session of its own, and one run of it for several requests.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "columns.h"

namespace native {

// One of ONNX Runtime's values, released with its owner.
class Value {
 public:
  Value(const ort::Api& api, ort::Value* value) : api_(&api), value_(value) {}
  Value(Value&& other) noexcept : api_(other.api_), value_(other.value_) { other.value_ = nullptr; }
  Value(const Value&) = delete;
  Value& operator=(const Value&) = delete;
  ~Value() { api_->release(ort::Api::kReleaseValue, value_); }
  ort::Value* get() const { return value_; }

 private:
  const ort::Api* api_;
  ort::Value* value_;
};

// An output of a whole batch.
struct Answer {
  int dtype = 0;
  std::vector<int64_t> dims;
  size_t row_bytes = 0;               // of numbers
  const char* data = nullptr;         // of numbers
  std::vector<std::string> texts;     // as they go over the wire, a row each
};

class Graph {
 public:
  Graph(const ort::Api& api, ort::Env* env, const std::string& path, const Settings& settings)
      : api_(api), settings_(settings) {
    using A = ort::Api;
    ort::SessionOptions* options = nullptr;
    api_.call(A::kCreateSessionOptions, &options);
    std::unique_ptr<ort::SessionOptions, Releaser> keep(options, Releaser{&api_, A::kReleaseSessionOptions});
    api_.call(A::kSetIntraOpThreads, options, settings.threads);
    api_.call(A::kSetInterOpThreads, options, 1);
    api_.call(A::kAddConfigEntry, options, "session.intra_op.allow_spinning", "0");
    api_.call(A::kCreateCpuMemoryInfo, 0 /* of a device */, 0 /* default */, &memory_);
    api_.call(A::kDefaultAllocator, &allocator_);
    api_.call(A::kCreateSession, env, path.c_str(), static_cast<const ort::SessionOptions*>(options), &session_);
    for (const Column& column : settings_.inputs) input_names_.push_back(column.name.c_str());
    for (const std::string& name : settings_.outputs) output_names_.push_back(name.c_str());
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  ~Graph() {
    api_.release(ort::Api::kReleaseSession, session_);
    api_.release(ort::Api::kReleaseMemoryInfo, memory_);
  }

  const Settings& settings() const { return settings_; }

  // Calls `use` with the outputs, in the order of the settings, while they are there.
  template <typename Use>
  void run(const std::vector<const Reading*>& batch, int64_t rows, Use use) {
    std::vector<std::vector<char>> numbers(settings_.inputs.size());
    std::vector<Value> values;
    std::vector<const ort::Value*> inputs;
    for (size_t place = 0; place < settings_.inputs.size(); ++place) {
      values.push_back(join(batch, place, rows, numbers[place]));
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
  struct Releaser {
    const ort::Api* api;
    size_t place;
    template <typename T>
    void operator()(T* object) const {
      api->release(place, object);
    }
  };

  Value join(const std::vector<const Reading*>& batch, size_t place, int64_t rows, std::vector<char>& numbers) {
    const Column& column = settings_.inputs[place];
    std::vector<int64_t> shape{rows};
    shape.insert(shape.end(), column.dims.begin(), column.dims.end());
    ort::Value* made = nullptr;
    if (column.bytes != 0) {
      numbers.reserve(size_t(rows) * column.width * column.bytes + 1);  // never without an address
      for (const Reading* each : batch) numbers.insert(numbers.end(), each->data[place].begin(), each->data[place].end());
      api_.call(ort::Api::kCreateTensorOver, static_cast<const ort::MemoryInfo*>(memory_), static_cast<void*>(numbers.data()),
                numbers.size(), static_cast<const int64_t*>(shape.data()), shape.size(), int(column.element), &made);
      return Value(api_, made);
    }
    api_.call(ort::Api::kCreateTensor, allocator_, static_cast<const int64_t*>(shape.data()), shape.size(), int(column.element), &made);
    Value value(api_, made);
    size_t index = 0;
    for (const Reading* each : batch) {
      for (std::string_view text : each->texts[place]) {
        char* buffer = nullptr;
        api_.call(ort::Api::kStringBuffer, made, index++, text.size(), &buffer);
        std::memcpy(buffer, text.data(), text.size());
      }
    }
    return value;
  }

  Answer read(const Value& output, int64_t rows) {
    using A = ort::Api;
    Answer answer;
    ort::TypeAndShape* info = nullptr;
    api_.call(A::kTypeAndShape, static_cast<const ort::Value*>(output.get()), &info);
    std::unique_ptr<ort::TypeAndShape, Releaser> keep(info, Releaser{&api_, A::kReleaseTypeAndShape});
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
