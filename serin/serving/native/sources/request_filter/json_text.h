// Reads JSON from its beginning to its end, without a copy: the request filter and the recorder's decoder.

#pragma once

#include "faults.h"

namespace serin {

// Which characters end a number or a word, and which of them begin or end a string or a list.
struct Ends {
  bool at[256] = {}, deep[256] = {};
  constexpr Ends() {
    for (unsigned char each : {',', ':', ' ', '\t', '\n', '\v', '\f', '\r'}) at[each] = true;
    for (unsigned char each : {'"', '[', ']', '{', '}'}) at[each] = deep[each] = true;
  }
};
constexpr Ends kEnds;

class JsonText {
 protected:
  explicit JsonText(Text text) : text_(text) {}

  char now() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  void skip_space() {
    at_ = behind([](char c) { return c == ' ' || (c >= '\t' && c <= '\r'); });
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
    for (at_ = behind(is_inside); now() == '\\'; at_ = behind(is_inside)) at_ += 2;
    if (at_ >= text_.size()) return false;
    inside = text_.substr(first, at_++ - first);
    return true;
  }

  // A number, or a word such as true.
  Text word() {
    size_t first = at_;
    at_ = behind([](char c) { return !kEnds.at[static_cast<unsigned char>(c)]; });
    return text_.substr(first, at_ - first);
  }

  // Goes behind a value of any kind.
  bool skip_value() {
    int depth = 0;
    Text ignored;
    skip_space();
    do {
      if (depth > 0) at_ = behind([](char c) { return !kEnds.deep[static_cast<unsigned char>(c)]; });
      char next = now();
      if (next == '"') {
        if (!string(ignored)) return false;
      } else if (next == '[' || next == '{') {
        ++depth, ++at_;
      } else if (next == ']' || next == '}') {
        if (--depth < 0) return false;
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
    return take('}') || members(member);
  }

  // The same from the name of a member on.
  template <typename Member>
  bool members(Member member) {
    do {
      Text key;
      if (!string(key) || !take(':') || !member(key)) return false;
    } while (take(','));
    return take('}');
  }

  Text text_;
  size_t at_ = 0;

 private:
  static bool is_inside(char c) { return c != '"' && c != '\\'; }

  // The place of the next character that is not like this. A loop over `at_` itself would write it for each character.
  template <typename Like>
  size_t behind(Like like) const {
    const char *now = text_.data() + at_, *end = text_.data() + text_.size();
    while (now < end && like(*now)) ++now;
    return static_cast<size_t>(now - text_.data());
  }
};

}  // namespace serin
