// The headers of a request: what this filter needs of them, read in one pass, and those that go no further.

#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "envoy_api.h"
#include "faults.h"

namespace serin {

constexpr Text kMayHeader = "x-serin-may";          // from keys.lua: the models that a key is for
constexpr Text kRefusedHeader = "x-serin-refused";  // from keys.lua: the answer to this request
constexpr Text kClientIdHeader = "x-serin-client-id";

inline Span span(Text text) { return {text.data(), text.size()}; }

// All values of a header, joined as Envoy joins them; `count` of them.
inline std::string header(Stream stream, Text key, size_t* count = nullptr) {
  auto read = [&](size_t index, size_t* counted) {
    Span value{nullptr, 0};
    envoy_dynamic_module_callback_http_get_header(stream, kRequestHeader, span(key), &value, index, counted);
    return value.data == nullptr ? Text() : Text(value.data, value.size);
  };
  size_t values = 0;
  std::string joined(read(0, &values));
  for (size_t index = 1; index < values; ++index) joined.append(",").append(read(index, nullptr));
  if (count != nullptr) *count = values;
  return joined;
}

inline void remove_header(Stream stream, Text key) {
  envoy_dynamic_module_callback_http_set_header(stream, kRequestHeader, span(key), {nullptr, 0});
}

inline void set_header(Stream stream, Text key, Text value) {
  envoy_dynamic_module_callback_http_set_header(stream, kRequestHeader, span(key), span(value));
}

inline void add_header(Stream stream, Text key, Text value) {
  envoy_dynamic_module_callback_http_add_header(stream, kRequestHeader, span(key), span(value));
}

// Decimal digits and nothing else; more than `limit` when it does not fit.
inline bool read_length(Text text, size_t limit, size_t& length) {
  length = 0;
  for (char digit : text) {
    if (digit < '0' || digit > '9') return false;
    length = std::min(length * 10 + static_cast<size_t>(digit - '0'), limit + 1);
  }
  return !text.empty();
}

// What a request's headers say. Texts end with the first change of a header.
class Seen {
 public:
  explicit Seen(Stream stream) {
    std::vector<Header> found(envoy_dynamic_module_callback_http_get_headers_size(stream, kRequestHeader));
    if (found.empty()) return;
    if (!envoy_dynamic_module_callback_http_get_headers(stream, kRequestHeader, found.data())) return;
    for (const Header& each : found) look(Text(each.key, each.key_size), Text(each.value, each.value_size));
  }

  Text path() const { return path_; }
  Text content_length() const { return lengths_ == 1 ? content_length_ : Text(); }
  bool guarded() const { return guarded_; }
  bool refused() const { return refused_; }
  bool compressed() const { return compressed_; }

  void remove_odd_ones(Stream stream) const {
    for (const std::string& key : odd_) remove_header(stream, key);
  }

 private:
  void look(Text key, Text value) {
    if (key == ":path") {
      path_ = value;
    } else if (key == "content-length") {
      content_length_ = value;
      ++lengths_;
    } else if (key == "content-encoding") {
      compressed_ = true;
    } else if (key == "authorization") {  // a key, although none is asked for: it is nobody else's business
      if (value.find("serin_") != Text::npos) odd_.emplace_back(key);
    } else if (begins(key, "x-serin-")) {
      look_at_ours(key, value);
    } else if (ends(key, "-bin")) {
      odd_.emplace_back(key);  // ends a gRPC call if it is not base64
    }
  }

  // Those that a client sets are gone already (client_ids.py).
  void look_at_ours(Text key, Text value) {
    if (key == kMayHeader) {
      guarded_ = true;
      odd_.emplace_back(key);
    } else if (key == kRefusedHeader) {
      refused_ = true;
    } else if (key == kClientIdHeader && !printable(value)) {
      odd_.emplace_back(key);  // Triton's Python backend fails requests with other bytes in a header
    }
  }

  static bool begins(Text text, Text with) { return text.substr(0, with.size()) == with; }

  static bool ends(Text text, Text with) {
    return text.size() >= with.size() && text.substr(text.size() - with.size()) == with;
  }

  static bool printable(Text text) {
    return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
  }

  Text path_, content_length_;
  size_t lengths_ = 0;
  bool guarded_ = false, refused_ = false, compressed_ = false;
  std::vector<std::string> odd_;
};

}  // namespace serin
