// Reads JSON from its beginning to its end, without a copy: the request filter and the recorder's decoder.

#pragma once

#include "faults.h"

namespace serin {

// Which characters end a number or a word.
struct Ends {
  bool at[256] = {};
  constexpr Ends() {
    for (unsigned char each : {',', ']', '}', '"', '[', '{', ':', ' ', '\t', '\n', '\v', '\f', '\r'}) at[each] = true;
  }
};

class JsonText {
 protected:
  explicit JsonText(Text text) : text_(text) {}

  char now() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || (text_[at_] >= '\t' && text_[at_] <= '\r'))) ++at_;
  }

  bool take(char wanted) {
    skip_space();
    if (now() != wanted || at_ >= text_.size()) return false;
    ++at_;
    return true;
  }

  // A string, without its quotes, as it is written.
  bool string(Text& inside) {
    if (!take('"')) return false;
    size_t first = at_;
    while (at_ < text_.size() && text_[at_] != '"') at_ += text_[at_] == '\\' ? 2 : 1;
    if (at_ >= text_.size()) return false;
    inside = text_.substr(first, at_++ - first);
    return true;
  }

  // A number, or a word such as true.
  Text word() {
    static constexpr Ends kEnds;
    size_t first = at_;
    while (at_ < text_.size() && !kEnds.at[static_cast<unsigned char>(text_[at_])]) ++at_;
    return text_.substr(first, at_ - first);
  }

  // Goes behind a value of any kind.
  bool skip_value() {
    int depth = 0;
    Text ignored;
    do {
      skip_space();
      char next = now();
      if (next == '"') {
        if (!string(ignored)) return false;
      } else if (next == '[' || next == '{') {
        ++depth, ++at_;
      } else if (next == ']' || next == '}') {
        if (--depth < 0) return false;
        ++at_;
      } else if (depth > 0 && (next == ',' || next == ':')) {
        ++at_;
      } else if (word().empty()) {
        return false;
      }
    } while (depth > 0);
    return true;
  }

  // Calls `member` with the name of each member of an object; it goes behind the value. False: not an object.
  template <typename Member>
  bool object(Member member) {
    if (!take('{')) return false;
    if (take('}')) return true;
    do {
      Text key;
      if (!string(key) || !take(':') || !member(key)) return false;
    } while (take(','));
    return take('}');
  }

  Text text_;
  size_t at_ = 0;
};

}  // namespace serin
