// The rows of several requests as the inputs of one run, whole or in pieces.
#pragma once

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

inline std::vector<int64_t> shape_of(const Column& column, int64_t rows) {
  std::vector<int64_t> shape{rows};
  shape.insert(shape.end(), column.dims.begin(), column.dims.end());
  return shape;
}

// A tensor over memory that is somebody else's and holds `rows` rows of numbers.
inline Value tensor_over(const ort::Api& api, const ort::MemoryInfo* memory, const Column& column, int64_t rows, void* data) {
  std::vector<int64_t> shape = shape_of(column, rows);
  ort::Value* made = nullptr;
  api.call(ort::Api::kCreateTensorOver, memory, data, size_t(rows) * column.width * column.bytes,
           static_cast<const int64_t*>(shape.data()), shape.size(), int(column.element), &made);
  return Value(api, made);
}

// Requests in a row, as one table.
class Joined {
 public:
  explicit Joined(const std::vector<const Reading*>& batch) : batch_(batch) {}

  // Calls `use(reading, first, count)` for the rows from `begin` to `end`, request by request.
  template <typename Use>
  void pieces(int64_t begin, int64_t end, Use use) const {
    int64_t start = 0;
    for (const Reading* each : batch_) {
      int64_t first = std::max<int64_t>(begin - start, 0), last = std::min(end - start, each->rows);
      if (first < last) use(*each, size_t(first), size_t(last - first));
      start += each->rows;
      if (start >= end) break;
    }
  }

  // One input of these rows. `numbers` holds its values, if they are numbers, and must outlive it.
  Value input(const ort::Api& api, const ort::MemoryInfo* memory, ort::Allocator* allocator, const Column& column,
              size_t place, int64_t begin, int64_t end, std::vector<char>& numbers) const {
    int64_t rows = end - begin;
    if (column.bytes != 0) {
      size_t row = column.width * column.bytes;
      numbers.reserve(size_t(rows) * row + 1);  // never without an address
      pieces(begin, end, [&](const Reading& each, size_t first, size_t count) {
        std::string_view part = each.data[place].substr(first * row, count * row);
        numbers.insert(numbers.end(), part.begin(), part.end());
      });
      return tensor_over(api, memory, column, rows, numbers.data());
    }
    std::vector<int64_t> shape = shape_of(column, rows);
    ort::Value* made = nullptr;
    api.call(ort::Api::kCreateTensor, allocator, static_cast<const int64_t*>(shape.data()), shape.size(), int(column.element), &made);
    Value value(api, made);
    size_t index = 0;
    pieces(begin, end, [&](const Reading& each, size_t first, size_t count) {
      for (size_t at = first * column.width; at < (first + count) * column.width; ++at) {
        std::string_view text = each.texts[place][at];
        char* buffer = nullptr;
        api.call(ort::Api::kStringBuffer, made, index++, text.size(), &buffer);
        std::memcpy(buffer, text.data(), text.size());
      }
    });
    return value;
  }

 private:
  const std::vector<const Reading*>& batch_;
};

}  // namespace native
