// What a model is asked with, and the reading of one request: every value is looked at before it may join a batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "ort_api.h"
#include "triton_api.h"

namespace native {

// What is wrong with one request, in words for its sender.
struct BadRequest : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct Column {
  std::string name;
  std::string kind;
  int dtype = 0;
  ort::Element element = ort::kFloat;
  size_t bytes = 0;  // of one value; 0: a text
  std::vector<int64_t> dims;
  size_t width = 1;  // values in a row
};

// A model in two parts: a front on the CPU, and a core on a device, which reads the front's outputs.
struct Split {
  std::string provider;            // cuda, or cpu: the host's memory plays the device's
  size_t arena_bytes = 0;          // that ONNX Runtime may use on the device; 0: any
  bool graphs = false;             // a CUDA graph for each size of batch
  size_t workers = 1;              // that run the front, each on some of the rows
  int64_t piece_rows = 256;        // and on at least so many
  std::vector<int64_t> sizes;      // of batches, rising: a batch is filled up to the next
  std::vector<Column> inner;       // from the front to the core
  std::vector<Column> outer;       // the core's outputs, in the order of the settings'
};

// native.txt beside the graph, a line for each: `threads 1`, `max_string_bytes 65536`, `input KIND DIMS NAME`,
// `output NAME`. Names are hexadecimal, because a column may have any name; sizes of a row have commas between them.
// Where the model is in two parts also `split PROVIDER ARENA_BYTES GRAPHS WORKERS PIECE_ROWS SIZES`, and
// `inner KIND DIMS NAME` and `outer KIND DIMS NAME` as for inputs.
struct Settings {
  int threads = 1;
  size_t most_bytes = 0;
  Split split;  // without sizes: the model is one graph
  std::vector<Column> inputs;
  std::vector<std::string> outputs;

  static Settings read(const std::string& path) {
    std::ifstream file(path);
    if (!file) throw std::runtime_error("cannot read " + path);
    Settings found;
    std::string word, hex;
    while (file >> word) {
      if (word == "threads") {
        file >> found.threads;
      } else if (word == "max_string_bytes") {
        file >> found.most_bytes;
      } else if (word == "output") {
        file >> hex;
        found.outputs.push_back(name(hex));
      } else if (word == "input") {
        found.inputs.push_back(column(file));
      } else if (word == "inner") {
        found.split.inner.push_back(column(file));
      } else if (word == "outer") {
        found.split.outer.push_back(column(file));
      } else if (word == "split") {
        read_split(file, found.split);
      } else {
        throw std::runtime_error(path + ": what is '" + word + "'?");
      }
      if (!file) throw std::runtime_error(path + ": a line is cut off");
    }
    if (found.inputs.empty() || found.outputs.empty()) throw std::runtime_error(path + " names no tensors");
    if (!found.split.sizes.empty()) check_split(found, path);
    return found;
  }

 private:
  static std::string name(const std::string& hex) {
    std::string text;
    for (size_t at = 0; at + 1 < hex.size(); at += 2) text += char(std::stoi(hex.substr(at, 2), nullptr, 16));
    return text;
  }

  static void read_split(std::ifstream& file, Split& split) {
    std::string sizes;
    file >> split.provider >> split.arena_bytes >> split.graphs >> split.workers >> split.piece_rows >> sizes;
    std::stringstream each(sizes);
    for (std::string size; std::getline(each, size, ',');) split.sizes.push_back(std::stoll(size));
  }

  static void check_split(const Settings& found, const std::string& path) {
    const Split& split = found.split;
    bool rising = split.sizes.front() > 0 && std::is_sorted(split.sizes.begin(), split.sizes.end());
    bool known = split.provider == "cuda" || split.provider == "cpu";
    bool whole = !split.inner.empty() && split.outer.size() == found.outputs.size();
    for (size_t place = 0; whole && place < split.outer.size(); ++place) whole = split.outer[place].name == found.outputs[place];
    for (const auto* columns : {&split.inner, &split.outer}) {
      for (const Column& column : *columns) whole = whole && column.bytes != 0;
    }
    if (!rising || !known || !whole || split.workers == 0 || split.piece_rows <= 0) {
      throw std::runtime_error(path + " does not say how the model is split");
    }
  }

  static Column column(std::ifstream& file) {
    Column made;
    std::string dims, hex;
    file >> made.kind >> dims >> hex;
    made.name = name(hex);
    std::stringstream sizes(dims);
    for (std::string size; std::getline(sizes, size, ',');) {
      made.dims.push_back(std::stoll(size));
      made.width *= made.dims.back();
    }
    if (made.kind == "string") {
      made.dtype = triton::kBytes, made.element = ort::kString;
    } else if (made.kind == "float") {
      made.dtype = triton::kFloat, made.element = ort::kFloat, made.bytes = 4;
    } else if (made.kind == "int" || made.kind == "timestamp") {
      made.dtype = triton::kInt64, made.element = ort::kInt64, made.bytes = 8;
    } else if (made.kind == "bool") {
      made.dtype = triton::kInt8, made.element = ort::kInt8, made.bytes = 1;
    } else {
      throw std::runtime_error("a column of kind '" + made.kind + "'");
    }
    return made;
  }
};

inline void check(TRITONSERVER_Error* error) {
  if (error == nullptr) return;
  std::string text = TRITONSERVER_ErrorMessage(error);
  TRITONSERVER_ErrorDelete(error);
  throw std::runtime_error(text);
}

// As Unicode defines it: no overlong forms, no surrogates, nothing beyond U+10FFFF.
inline bool is_utf8(std::string_view text) {
  const auto* at = reinterpret_cast<const unsigned char*>(text.data());
  const auto* end = at + text.size();
  while (at < end) {
    if (*at < 0x80) {
      ++at;
      continue;
    }
    int more = *at >= 0xF0 ? 3 : *at >= 0xE0 ? 2 : 1;
    if (*at < 0xC2 || *at > 0xF4 || end - at <= more) return false;
    if ((*at == 0xE0 && at[1] < 0xA0) || (*at == 0xED && at[1] > 0x9F)) return false;
    if ((*at == 0xF0 && at[1] < 0x90) || (*at == 0xF4 && at[1] > 0x8F)) return false;
    for (int place = 1; place <= more; ++place) {
      if ((at[place] & 0xC0) != 0x80) return false;
    }
    at += more + 1;
  }
  return true;
}

// One request's values, by column; texts as views into them. All of it belongs to the request.
struct Reading {
  int64_t rows = 0;
  std::vector<std::string_view> data;                // of numbers
  std::vector<std::vector<std::string_view>> texts;  // of columns of texts
  std::vector<std::string> joined;                   // of inputs that came in several pieces

  void read(TRITONBACKEND_Request* request, const Settings& settings) {
    size_t count = settings.inputs.size();
    data.assign(count, {});
    texts.assign(count, {});
    joined.reserve(count);  // views point into them
    for (size_t place = 0; place < count; ++place) {
      const Column& column = settings.inputs[place];
      data[place] = bytes(request, column, place == 0 ? nullptr : settings.inputs[0].name.c_str());
      size_t values = size_t(rows) * column.width;
      if (column.bytes == 0) {
        texts[place] = split(data[place], values, column, settings.most_bytes);
      } else if (data[place].size() != values * column.bytes) {
        throw BadRequest("input '" + column.name + "' holds " + std::to_string(data[place].size()) + " bytes, its shape asks for " +
                         std::to_string(values * column.bytes));
      } else if (column.kind == "bool") {
        check_bools(data[place], column);
      }
    }
  }

 private:
  std::string_view bytes(TRITONBACKEND_Request* request, const Column& column, const char* first) {
    TRITONBACKEND_Input* input = nullptr;
    if (TRITONSERVER_Error* error = TRITONBACKEND_RequestInput(request, column.name.c_str(), &input)) {
      TRITONSERVER_ErrorDelete(error);
      throw BadRequest("input '" + column.name + "' is missing");
    }
    const char* name;
    int dtype;
    const int64_t* shape;
    uint32_t dims, buffers;
    uint64_t size;
    check(TRITONBACKEND_InputProperties(input, &name, &dtype, &shape, &dims, &size, &buffers));
    if (dtype != column.dtype) throw BadRequest("input '" + column.name + "' is of another type than the model asks for");
    bool fits = dims == column.dims.size() + 1 && shape[0] >= 0 && shape[0] <= INT32_MAX &&
                std::equal(column.dims.begin(), column.dims.end(), shape + 1);
    if (!fits) throw BadRequest("input '" + column.name + "' has another shape than the model asks for");
    if (first == nullptr) {
      rows = shape[0];
    } else if (shape[0] != rows) {
      throw BadRequest("input '" + column.name + "' has " + std::to_string(shape[0]) + " rows, input '" + first + "' has " +
                       std::to_string(rows));
    }
    std::string_view whole;
    for (uint32_t index = 0; index < buffers; ++index) {
      const void* data = nullptr;
      uint64_t length = 0;
      int memory = triton::kMemoryCpu;
      int64_t device = 0;
      check(TRITONBACKEND_InputBuffer(input, index, &data, &length, &memory, &device));
      if (memory == triton::kMemoryGpu) throw std::runtime_error("an input lies in a GPU's memory");
      if (buffers == 1) return {static_cast<const char*>(data), length};
      if (index == 0) joined.emplace_back();
      joined.back().append(static_cast<const char*>(data), length);
      whole = joined.back();
    }
    return whole;
  }

  static std::string at(const Column& column, size_t row) {
    return "input '" + column.name + "': row " + std::to_string(row);
  }

  // Each text stands behind its length in four bytes.
  static std::vector<std::string_view> split(std::string_view data, size_t values, const Column& column, size_t most) {
    std::vector<std::string_view> found;
    if (values > data.size() / 4) throw BadRequest("input '" + column.name + "' holds fewer texts than its shape says");
    found.reserve(values);
    for (size_t row = 0; row < values; ++row) {
      uint32_t length = 0;
      if (data.size() < 4) throw BadRequest("input '" + column.name + "' holds fewer texts than its shape says");
      std::memcpy(&length, data.data(), 4);
      data.remove_prefix(4);
      if (length > data.size()) throw BadRequest("input '" + column.name + "' ends inside of a text");
      found.push_back(data.substr(0, length));
      data.remove_prefix(length);
      if (!is_utf8(found.back())) throw BadRequest(at(column, row) + " is not UTF-8");
      if (length > most) {
        throw BadRequest(at(column, row) + " has " + std::to_string(length) + " bytes; at most " + std::to_string(most) + " are taken");
      }
    }
    if (!data.empty()) throw BadRequest("input '" + column.name + "' holds more than its shape says");
    return found;
  }

  static void check_bools(std::string_view values, const Column& column) {
    for (size_t row = 0; row < values.size(); ++row) {
      int value = static_cast<signed char>(values[row]);
      if (value < -1 || value > 1) {
        throw BadRequest(at(column, row) + " is " + std::to_string(value) + "; a bool is 0 or 1, or -1 for null");
      }
    }
  }
};

}  // namespace native
