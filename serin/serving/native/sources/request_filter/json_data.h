// Rewrites the `data` of JSON inputs where a client's JSON cannot write what Triton reads: `null` becomes the null of the
// input's type, and a number such as 2007.0 or 1e3 the integer that it is. A value that Triton would refuse is refused
// here, with its input and its place. A text that is not as the protocol wants it stays as it is: Triton says why.

#pragma once

#include <string>
#include <vector>

#include "json_text.h"

namespace serin {

constexpr size_t kShownBytes = 40;  // of a name or a value in a refusal
constexpr size_t kDigits = 19;      // of the largest int64

struct DataType {
  Text name, null;     // null: as Triton reads it; "": the type has none
  uint64_t most;       // of integers; 0: not an integer
  bool text, number;
};

constexpr DataType kDataTypes[] = {
    {"FP32", "NaN", 0, false, true},
    {"FP64", "NaN", 0, false, true},
    {"INT64", "-9223372036854775808", INT64_MAX, false, true},
    {"INT32", "", INT32_MAX, false, true},
    {"INT16", "", INT16_MAX, false, true},
    {"INT8", "-1", INT8_MAX, false, true},
    {"BYTES", "\"\"", 0, true, false},
};

// A number of JSON: `whole` digits, and those behind the point and the exponent's.
struct Number {
  bool negative = false, plain = true;  // plain: an integer without point and exponent
  Text whole, part, exponent;

  // False: not a number of JSON.
  bool read(Text word) {
    size_t at = 0;
    auto digits = [&] {
      size_t first = at;
      while (at < word.size() && word[at] >= '0' && word[at] <= '9') ++at;
      return word.substr(first, at - first);
    };
    auto is = [&](char one, char other) { return at < word.size() && (word[at] == one || word[at] == other); };
    if ((negative = is('-', '-'))) ++at;
    whole = digits();
    if (whole.empty() || (whole[0] == '0' && whole.size() > 1)) return false;
    if (is('.', '.')) {
      ++at, plain = false;
      if ((part = digits()).empty()) return false;
    }
    if (is('e', 'E')) {
      size_t first = ++at;
      plain = false;
      if (is('-', '+')) ++at;
      if (digits().empty()) return false;
      exponent = word.substr(first, at - first);
    }
    return at == word.size();
  }
};

// A number exactly: `digits`, without zeros at their ends, times ten to the power of `power`.
struct Decimal {
  bool negative;
  std::string digits;
  int64_t power = 0;

  explicit Decimal(const Number& number) : negative(number.negative) {
    digits.append(number.whole).append(number.part);
    bool minus = !number.exponent.empty() && number.exponent[0] == '-';
    for (char each : number.exponent) {
      if (each >= '0') power = std::min<int64_t>(power * 10 + (each - '0'), int64_t{1} << 40);
    }
    power = (minus ? -power : power) - static_cast<int64_t>(number.part.size());
    while (!digits.empty() && digits.back() == '0') digits.pop_back(), ++power;
    digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size()));
  }

  bool is_integer() const { return digits.empty() || power >= 0; }

  // Its digits, when it is an integer of at most `most`, or of at least -most - 1; "": it does not fit.
  std::string integer(uint64_t most) const {
    if (digits.empty()) return "0";
    if (digits.size() + static_cast<uint64_t>(power) > kDigits) return "";
    std::string all = digits + std::string(static_cast<size_t>(power), '0');
    if (std::stoull(all) > most + (negative ? 1 : 0)) return "";
    return negative ? "-" + all : all;
  }
};

class DataRewriter : JsonText {
 public:
  DataRewriter(Text text, size_t most) : JsonText(text), most_(most) {}

  // Whether the text is another one now: `result`. `fault`: why it is refused, else empty.
  bool rewrite() {
    if (!document() || !fault.empty() || !changed_) return false;
    result.append(text_.substr(copied_));
    if (result.size() > most_) fault = too_large();
    return fault.empty();
  }

  std::string result, fault;

 private:
  struct Input {
    Text name, type;
    size_t data = Text::npos;
    int names = 0, types = 0, datas = 0;
  };

  std::string too_large() const {
    return "the request is too large with its nulls written out; at most " + std::to_string(most_) + " bytes are taken";
  }

  bool document() {
    int lists = 0;
    bool good = object([&](Text key) { return key == "inputs" ? ++lists == 1 && inputs() : skip_value(); });
    skip_space();
    return good && at_ == text_.size();
  }

  bool inputs() {
    if (!take('[')) return false;
    if (take(']')) return true;
    do {
      if (!input()) return false;
    } while (take(','));
    return take(']');
  }

  // A name, a type or data that is there twice is somebody's trick: which of the two is read depends on the reader.
  bool input() {
    Input known;
    bool good = object([&](Text key) {
      if (key == "name") return ++known.names == 1 && string(known.name);
      if (key == "datatype") return ++known.types == 1 && string(known.type);
      if (key != "data") return skip_value();
      skip_space();
      known.data = at_;
      return ++known.datas == 1 && skip_value();
    });
    if (!good) return false;
    for (const DataType& type : kDataTypes) {
      if (type.name != known.type || known.data == Text::npos || text_[known.data] != '[') continue;
      size_t behind = at_;
      at_ = known.data;
      bool read = data(known.name, type);
      at_ = behind;
      return read;
    }
    return true;
  }

  // Lists of lists, of any shape: Triton reads one value after the other.
  bool data(Text name, const DataType& type) {
    std::vector<size_t> places;
    bool value = true;  // wanted next; else a comma or the end of a list
    do {
      skip_space();
      char next = now();
      if (value && next == '[') {
        if (places.size() >= static_cast<size_t>(kMaxDepth)) return false;
        places.push_back(0), ++at_;
        skip_space();
        value = now() != ']';
      } else if (value) {
        std::string wrong = element(type);
        if (!wrong.empty()) return refuse(name, places, wrong);
        value = false;
      } else if (next == ',') {
        ++places.back(), ++at_;
        value = true;
      } else if (next == ']') {
        places.pop_back(), ++at_;
      } else {
        return false;
      }
    } while (!places.empty());
    return true;
  }

  // Why a value is refused, or "".
  std::string element(const DataType& type) {
    size_t first = at_;
    Text inside;
    bool quoted = now() == '"';
    if (quoted ? !string(inside) : now() == '{' ? !skip_value() : word().empty()) return "this is not JSON";
    Text found = text_.substr(first, at_ - first);
    if (found == "null") {
      if (type.null.empty()) return "null is not a value of type " + std::string(type.name);
      replace(first, type.null);
      return "";
    }
    if (type.text) return quoted ? "" : shown(found) + " is not a string";
    if (type.most == 0) return is_float(found) ? "" : shown(found) + " is not a number";
    Number number;
    if (!number.read(found)) return shown(found) + " is not an integer";
    if (number.plain && type.most == INT64_MAX && number.whole.size() < kDigits) return "";  // nearly all
    Decimal exact(number);
    if (!exact.is_integer()) return shown(found) + " is not an integer";
    std::string digits = exact.integer(type.most);
    if (digits.empty()) return shown(found) + " does not fit into " + std::string(type.name);
    if (!number.plain) replace(first, digits);
    return "";
  }

  static bool is_float(Text found) {
    Text bare = found.substr(found[0] == '-' ? 1 : 0);
    return bare == "NaN" || bare == "Inf" || bare == "Infinity" || Number().read(found);
  }

  void replace(size_t first, Text with) {
    result.append(text_.substr(copied_, first - copied_)).append(with);
    copied_ = at_;
    changed_ = true;
  }

  bool refuse(Text name, const std::vector<size_t>& places, const std::string& wrong) {
    fault = "input '" + shown(name) + "', data";
    for (size_t place : places) fault += "[" + std::to_string(place) + "]";
    fault += ": " + wrong;
    return false;
  }

  // As much of a text as a refusal shows, as plain characters.
  static std::string shown(Text text) {
    bool cut = text.size() > kShownBytes;
    size_t size = cut ? kShownBytes : text.size();
    while (cut && size > 0 && (text[size] & 0xC0) == 0x80) --size;  // not within a character
    std::string found(text.substr(0, size));
    bool readable = is_utf8(found);
    for (char& each : found) {
      unsigned char c = static_cast<unsigned char>(each);
      if (c < ' ' || c == 0x7f || (c > 0x7f && !readable)) each = '?';
    }
    return cut ? found + "..." : found;
  }

  size_t most_, copied_ = 0;
  bool changed_ = false;
};

}  // namespace serin
