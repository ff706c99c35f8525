// Appends the values of tensors to columns.

#pragma once

#include <locale.h>

#include <cmath>
#include <cstdlib>
#include <cstring>

#include "../request_filter/json_data.h"
#include "tensors.h"

namespace serin {

// A column of all requests: numbers as they are in memory, or strings as their lengths and bytes. `given`: for each
// request, whether an output is there. `name`, `kind` and `width` are the model's.
struct Column {
  std::string name;
  const DataKind* kind = nullptr;
  int64_t width = 1;
  bool hidden = false;
  std::string data, given;
  std::vector<uint32_t> lengths;

  void add_text(Text text) {
    data.append(text);
    lengths.push_back(static_cast<uint32_t>(text.size()));
  }

  template <typename Number>
  void add(Number value) {
    data.append(reinterpret_cast<const char*>(&value), sizeof value);
  }

  void add_float(double value) {
    if (kind->bytes == 4) {
      add(static_cast<float>(value));
    } else {
      add(value);
    }
  }

  // False: it does not fit.
  bool add_integer(int64_t value) {
    if (value < kind->low || value > kind->high) return false;
    data.append(reinterpret_cast<const char*>(&value), kind->bytes);  // the low bytes come first
    return true;
  }

  size_t count() const { return kind->bytes == 0 ? lengths.size() : data.size() / kind->bytes; }

  bool is_float() const { return kind->contents == 6 || kind->contents == 7; }
};

// Exact where digits and exponent are few, as nearly always; else as the C library reads it, in no country's way.
class Floats {
 public:
  static bool read(Text word, double& value) {
    return simple(word, value) || special(word, value) || (Number().read(word) && by_library(word, value));
  }

 private:
  // Up to 19 digits, with a point among them. Python writes 17 of them for a float of 32 bits.
  static bool simple(Text word, double& value) {
    static constexpr double kPowers[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10,
                                         1e11, 1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19};
    const char *at = word.data(), *end = at + word.size();
    bool minus = at < end && *at == '-';
    at += minus;
    uint64_t digits = 0;
    const char* first = at;
    while (at < end && *at >= '0' && *at <= '9') digits = digits * 10 + static_cast<uint64_t>(*at++ - '0');
    if (at == first) return false;
    int power = 0;
    if (at < end && *at == '.') {
      const char* point = ++at;
      while (at < end && *at >= '0' && *at <= '9') digits = digits * 10 + static_cast<uint64_t>(*at++ - '0');
      power = static_cast<int>(at - point);
      if (power == 0) return false;
    }
    if (at != end || at - first - (power > 0) > 19) return false;
    bool exact = digits <= uint64_t{1} << 53;
    value = exact ? static_cast<double>(digits) / kPowers[power] : quotient(digits, static_cast<uint64_t>(kPowers[power]));
    if (minus) value = -value;
    return true;
  }

  // Rounded once: a quotient of 63 bits or more, whose last one says whether anything is left, becomes a double.
  static double quotient(uint64_t digits, uint64_t by) {
    int shift = 63 + __builtin_clzll(digits) - __builtin_clzll(by);
    auto whole = static_cast<unsigned __int128>(digits) << shift;
    auto found = static_cast<uint64_t>(whole / by);
    return std::ldexp(static_cast<double>(found | (whole != static_cast<unsigned __int128>(found) * by)), -shift);
  }

  static bool special(Text word, double& value) {
    bool minus = word.substr(0, 1) == "-";
    Text bare = word.substr(minus ? 1 : 0);
    if (word == "null" || bare == "NaN") {
      value = std::nan("");
    } else if (bare == "Infinity" || bare == "Inf") {
      value = minus ? -HUGE_VAL : HUGE_VAL;
    } else {
      return false;
    }
    return true;
  }

  static bool by_library(Text word, double& value) {
    static const locale_t kPlain = newlocale(LC_ALL_MASK, "C", nullptr);
    std::string copy(word);
    value = strtod_l(copy.c_str(), nullptr, kPlain);
    return true;
  }
};

// The values in a list of JSON, or in lists of lists: one after the other.
class JsonValues : JsonText {
 public:
  JsonValues(Text list, Column& column) : JsonText(list), column_(column) {}

  bool append() {
    int depth = 0;
    bool value = true;  // wanted next; else a comma or the end of a list
    do {
      skip_space();
      char next = now();
      if (value && next == '[') {
        if (++depth > kMaxDepth) return false;
        ++at_;
        skip_space();
        value = now() != ']';
      } else if (value) {
        if (!element()) return false;
        value = false;
      } else if (next == ',') {
        ++at_, value = true;
      } else if (next == ']') {
        ++at_, --depth;
      } else {
        return false;
      }
    } while (depth > 0);
    return at_ == text_.size();
  }

 private:
  bool element() {
    if (column_.kind->bytes == 0) return text();
    if (column_.kind->contents == 0) return false;
    Text found = word();
    if (column_.is_float()) {
      double value = 0;
      if (!Floats::read(found, value)) return false;
      column_.add_float(value);
      return true;
    }
    int64_t value = 0;
    return integer(found == "null" ? column_.kind->null : found, value) && column_.add_integer(value);
  }

  bool text() {
    Text inside;
    if (now() != '"') {
      if (word() != "null") return false;
      column_.add_text("");
      return true;
    }
    if (!string(inside)) return false;
    if (inside.find('\\') == Text::npos) {
      column_.add_text(inside);
      return true;
    }
    size_t before = column_.data.size();
    if (!unescape(inside, column_.data)) return false;
    column_.lengths.push_back(static_cast<uint32_t>(column_.data.size() - before));
    return true;
  }

  static bool integer(Text found, int64_t& value) {
    if (found == "true" || found == "false") {
      value = found == "true";
      return true;
    }
    Number number;
    if (!number.read(found)) return false;
    std::string digits;
    if (!number.plain || number.whole.size() >= kDigits) {
      Decimal exact(number);
      digits = exact.is_integer() ? exact.integer(INT64_MAX) : "";
      if (digits.empty()) return false;
      found = digits;
    }
    uint64_t size = 0;
    for (char each : found.substr(found[0] == '-' ? 1 : 0)) size = size * 10 + static_cast<uint64_t>(each - '0');
    value = static_cast<int64_t>(found[0] == '-' ? ~size + 1 : size);
    return true;
  }

  Column& column_;
};

// Strings as they travel in binary: each behind its length in four bytes.
inline bool append_texts(Text data, Column& column) {
  while (!data.empty()) {
    uint32_t length = 0;
    if (data.size() < sizeof length) return false;
    std::memcpy(&length, data.data(), sizeof length);
    data.remove_prefix(sizeof length);
    if (length > data.size()) return false;
    column.add_text(data.substr(0, length));
    data.remove_prefix(length);
  }
  return true;
}

// gRPC's typed values: numbers one after the other, strings one a field.
inline bool append_contents(Text contents, Column& column) {
  return read_message(contents, kContents, [&](uint32_t number, Text content) {
    if (number != column.kind->contents || number == 0) return content.empty();
    if (column.kind->bytes == 0) {
      column.add_text(content);
    } else if (column.is_float()) {
      column.data.append(content);
    } else {
      uint64_t value = 0;
      for (size_t at = 0; at < content.size();) {
        if (!read_varint(content, at, value) || !column.add_integer(static_cast<int64_t>(value))) return false;
      }
    }
    return true;
  });
}

// Appends a tensor of as many values as its shape says. False: they cannot be read, and some may have been appended.
inline bool append(const Tensor& tensor, Column& column) {
  size_t before = column.count();
  bool good = false;
  if (tensor.form == Form::kJson) {
    good = JsonValues(tensor.data, column).append();
  } else if (tensor.form == Form::kContents) {
    good = append_contents(tensor.data, column);
  } else if (tensor.form == Form::kRaw && column.kind->bytes == 0) {
    good = append_texts(tensor.data, column);
  } else if (tensor.form == Form::kRaw && tensor.data.size() % column.kind->bytes == 0) {
    column.data.append(tensor.data);
    good = true;
  }
  return good && column.count() - before == static_cast<size_t>(tensor.rows * tensor.width);
}

// Appends values of an input that a request left out: null. False: its type has none.
inline bool append_nulls(int64_t count, Column& column) {
  for (int64_t each = 0; each < count; ++each) {
    if (!JsonValues("[null]", column).append()) return false;
  }
  return true;
}

}  // namespace serin
