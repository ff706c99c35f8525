// Requests that end Triton 2.51 before it looks at a single value. It allocates as many elements as a shape claims: so no
// shape may claim more elements than its request has bytes. It recurses for every bracket inside a bracket: so JSON may
// be nested only as deep as tensors are. message.h checks gRPC messages.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

namespace serin {

using Text = std::string_view;

constexpr size_t kHarmlessBytes = 4096;  // so few brackets Triton survives, however they are nested
constexpr int kMaxDepth = 32;

const std::string kTooLarge = "an input's shape claims more elements than the request can hold";
const std::string kTooDeep = "the request's JSON is nested too deeply";
const std::string kHidden = "plain letters must not be written as \\u escapes";

inline std::string too_long(size_t most) {
  return "a text in the request is too long; at most " + std::to_string(most) + " bytes are taken";
}

inline bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Multiplies `count` by one more size of a shape; false when there are more elements than `limit`.
inline bool grow(double& count, double size, double limit) {
  if (!(size >= 0) || size > limit || count * size > limit) return false;
  count *= size;
  return true;
}

// What is wrong with brackets outside of strings, or with the length of a string: `most` bytes, each of which may be
// written as six. A text of many megabytes would keep everybody waiting until it is refused. "": nothing.
inline std::string long_fault(Text text, size_t most) {
  int depth = 0;
  size_t at = 0;
  while (at < text.size()) {
    char now = text[at];
    if (now == '"') {
      size_t stop = std::min(text.size() - 1, ++at + 6 * most);
      while (at <= stop && text[at] != '"') at += text[at] == '\\' ? 2 : 1;
      if (at > stop && stop < text.size() - 1) return too_long(most);
    } else if (now == '[' || now == '{') {
      if (++depth > kMaxDepth) return kTooDeep;
    } else if (now == ']' || now == '}') {
      --depth;
    }
    ++at;
  }
  return "";
}

// "sh\u0061pe" would not be found as a shape. No encoder writes plain letters so.
inline bool hides_letters(Text text) {
  for (size_t at = text.find("\\u00"); at != Text::npos; at = text.find("\\u00", at + 1)) {
    size_t first = at;
    while (first > 0 && text[first - 1] == '\\') --first;
    bool escapes = (at - first) % 2 == 0;
    if (escapes && at + 4 < text.size() && (text[at + 4] == '6' || text[at + 4] == '7')) return true;
  }
  return false;
}

// One size as JSON writes it; what is no number Triton refuses by itself. Nearly all are a few digits.
inline double size_of(Text word) {
  size_t at = 0, end_of_digits = word.size();
  while (at < word.size() && is_space(word[at])) ++at;
  while (end_of_digits > at && is_space(word[end_of_digits - 1])) --end_of_digits;
  if (at < end_of_digits && end_of_digits - at <= 15) {  // a double holds each of them
    int64_t size = 0;
    while (at < end_of_digits && word[at] >= '0' && word[at] <= '9') size = size * 10 + (word[at++] - '0');
    if (at == end_of_digits) return static_cast<double>(size);
  }
  std::string copy(word);
  char* end = nullptr;
  double size = std::strtod(copy.c_str(), &end);
  if (end == copy.c_str()) return 1;
  while (*end != '\0' && is_space(*end)) ++end;
  return *end == '\0' ? size : 1;
}

// The sizes that follow the word "shape", up to the closing bracket.
inline bool shape_fits(Text after, double limit) {
  size_t at = 0;
  auto skip = [&] { while (at < after.size() && is_space(after[at])) ++at; };
  for (char wanted : {':', '['}) {
    skip();
    if (at >= after.size() || after[at++] != wanted) return true;
  }
  double count = 1;
  for (Text sizes = after.substr(at, after.find(']', at) - at); !sizes.empty();) {
    size_t comma = std::min(sizes.find(','), sizes.size());
    if (comma > 0 && !grow(count, size_of(sizes.substr(0, comma)), limit)) return false;
    sizes.remove_prefix(std::min(comma + 1, sizes.size()));
  }
  return true;
}

constexpr Text kShape = "\"shape\"";

// How far the word may be moved when this letter is below its last one (Horspool).
struct Steps {
  uint8_t of[256] = {};
  constexpr Steps() {
    for (uint8_t& each : of) each = kShape.size();
    for (size_t at = 0; at + 1 < kShape.size(); ++at) {
      of[static_cast<unsigned char>(kShape[at])] = static_cast<uint8_t>(kShape.size() - 1 - at);
    }
  }
};

// Where the word "shape" begins at `from` or later. A search for its first letter, the quote, stops at every word.
inline size_t find_shape(Text text, size_t from) {
  static constexpr Steps kSteps;
  constexpr size_t kLast = kShape.size() - 1;
  for (size_t last = from + kLast; last < text.size(); last += kSteps.of[static_cast<unsigned char>(text[last])]) {
    if (text[last] == kShape[kLast] && text.compare(last - kLast, kShape.size(), kShape) == 0) return last - kLast;
  }
  return Text::npos;
}

// "" when a JSON text can be read without harm, else what is wrong with it. `limit`: the bytes of the whole request.
inline std::string json_fault(Text text, size_t limit, size_t most) {
  if (text.size() > kHarmlessBytes) {
    std::string fault = long_fault(text, most);
    if (!fault.empty()) return fault;
  }
  if (hides_letters(text)) return kHidden;
  for (size_t at = find_shape(text, 0); at != Text::npos; at = find_shape(text, at)) {
    at += kShape.size();
    if (!shape_fits(text.substr(at), static_cast<double>(limit))) return kTooLarge;
  }
  return "";
}

// No character in more bytes than it needs, no surrogates, nothing above U+10FFFF.
inline bool is_utf8(Text text) {
  for (size_t at = 0; at < text.size();) {
    auto byte = [&](size_t index) { return static_cast<unsigned char>(text[index]); };
    unsigned first = byte(at++), low = 0x80, high = 0xbf;
    if (first < 0x80) continue;
    if (first < 0xc2 || first > 0xf4) return false;
    size_t more = first < 0xe0 ? 1 : first < 0xf0 ? 2 : 3;
    if (text.size() - at < more) return false;
    if (first == 0xe0) low = 0xa0;
    if (first == 0xed) high = 0x9f;
    if (first == 0xf0) low = 0x90;
    if (first == 0xf4) high = 0x8f;
    for (; more > 0; --more, low = 0x80, high = 0xbf) {
      unsigned next = byte(at++);
      if (next < low || next > high) return false;
    }
  }
  return true;
}

}  // namespace serin
