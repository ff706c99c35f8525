// Finds the tensors in requests and answers of the KServe v2 protocol, without looking at their values: JSON, JSON with
// binary tensors behind it, and gRPC. What two readers could take differently is not read.

#pragma once

#include <deque>
#include <string>
#include <vector>

#include "../request_filter/json_text.h"
#include "../request_filter/message.h"

namespace serin {

struct DataKind {
  Text name;
  size_t bytes;        // of a value; 0: strings
  int64_t low, high;   // of integers
  uint32_t contents;   // the field of gRPC's typed values; 0: it travels in binary alone
  Text null;           // as it travels; "": none
};

constexpr DataKind kKinds[] = {
    {"BYTES", 0, 0, 0, 8, "\"\""},
    {"FP32", 4, 0, 0, 6, "NaN"},
    {"FP64", 8, 0, 0, 7, "NaN"},
    {"FP16", 2, 0, 0, 0, ""},
    {"INT64", 8, INT64_MIN, INT64_MAX, 3, "-9223372036854775808"},
    {"INT32", 4, INT32_MIN, INT32_MAX, 2, ""},
    {"INT16", 2, INT16_MIN, INT16_MAX, 2, ""},
    {"INT8", 1, INT8_MIN, INT8_MAX, 2, "-1"},
    {"UINT8", 1, 0, UINT8_MAX, 4, ""},
    {"UINT16", 2, 0, UINT16_MAX, 4, ""},
    {"UINT32", 4, 0, UINT32_MAX, 4, ""},
    {"UINT64", 8, 0, INT64_MAX, 5, ""},
    {"BOOL", 1, 0, 1, 1, ""},
};

inline const DataKind* kind_of(Text name) {
  for (const DataKind& kind : kKinds) {
    if (kind.name == name) return &kind;
  }
  return nullptr;
}

enum class Form { kAbsent, kJson, kRaw, kContents };

constexpr int64_t kMostElements = int64_t{1} << 40;

struct Tensor {
  Text name;
  const DataKind* kind = nullptr;
  int64_t rows = -1, width = 1, binary = -1;  // binary: bytes behind the JSON
  Form form = Form::kAbsent;
  Text data;
  bool classified = false;

  // Adds a size to the shape; false when it is too large.
  bool add_size(int64_t size) {
    if (size < 0 || size > kMostElements) return false;
    if (rows < 0) {
      rows = size;
    } else {
      width *= size;
    }
    return width <= kMostElements;
  }
};

// Appends the UTF-8 of a string as JSON writes it. Half of a surrogate pair becomes a replacement character.
inline bool unescape(Text from, std::string& to) {
  auto hex = [&](size_t at, uint32_t& code) {
    code = 0;
    if (at + 4 > from.size()) return false;
    for (size_t each = at; each < at + 4; ++each) {
      char c = from[each];
      int digit = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
      if (digit < 0) return false;
      code = code * 16 + static_cast<uint32_t>(digit);
    }
    return true;
  };
  auto put = [&](uint32_t code) {
    if (code < 0x80) {
      to += static_cast<char>(code);
    } else if (code < 0x800) {
      to += {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
    } else if (code < 0x10000) {
      to += {static_cast<char>(0xE0 | code >> 12), static_cast<char>(0x80 | (code >> 6 & 63)), static_cast<char>(0x80 | (code & 63))};
    } else {
      to += {static_cast<char>(0xF0 | code >> 18), static_cast<char>(0x80 | (code >> 12 & 63)),
             static_cast<char>(0x80 | (code >> 6 & 63)), static_cast<char>(0x80 | (code & 63))};
    }
  };
  constexpr Text kLetters = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
  for (size_t at = 0; at < from.size();) {
    size_t plain = std::min(from.find('\\', at), from.size());
    to.append(from.substr(at, plain - at));
    if (plain == from.size()) return true;
    at = plain + 2;
    if (at > from.size()) return false;
    size_t letter = kLetters.find(from[at - 1]);
    uint32_t code = 0, low = 0;
    if (letter != Text::npos) {
      to += kMeant[letter];
    } else if (from[at - 1] == 'u' && hex(at, code)) {
      at += 4;
      bool high = code >= 0xD800 && code < 0xDC00;
      bool pair = high && from.substr(at, 2) == "\\u" && hex(at + 2, low) && low >= 0xDC00 && low < 0xE000;
      if (pair) at += 6;
      put(pair ? 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) : code >= 0xD800 && code < 0xE000 ? 0xFFFD : code);
    } else {
      return false;
    }
  }
  return true;
}

// How a tensor's JSON began before its parameters and data, and what it said: those of one client are alike.
struct Beginning {
  std::string text;
  Tensor tensor;  // its name is in `text`
};

// A request or an answer. `id`: the request's own. `classified`: outputs that were asked for as classes.
struct Message {
  std::vector<Tensor> tensors;
  std::string id;
  std::vector<std::string> classified;
  std::deque<std::string> names;     // that were written with escapes
  std::deque<Beginning> beginnings;  // of the tensors of messages before, by place

  void clear() { tensors.clear(), id.clear(), classified.clear(), names.clear(); }

  Tensor* find(Text name, size_t hint) {
    if (hint < tensors.size() && tensors[hint].name == name) return &tensors[hint];
    for (Tensor& each : tensors) {
      if (each.name == name) return &each;
    }
    return nullptr;
  }

  // `columns`: of the model, whose names differ. Where they are in its order, there are none.
  template <typename Columns>
  bool has_twins(const Columns& columns) const {
    size_t place = 0;
    while (place < tensors.size() && place < columns.size() && tensors[place].name == columns[place].name) ++place;
    if (place == tensors.size()) return false;
    for (size_t one = 0; one < tensors.size(); ++one) {
      for (size_t other = one + 1; other < tensors.size(); ++other) {
        if (tensors[one].name == tensors[other].name) return true;
      }
    }
    return false;
  }
};

class JsonMessage : JsonText {
 public:
  JsonMessage(Text text, Message& found) : JsonText(text), found_(found) {}

  // `list`: "inputs" or "outputs"; `behind`: the binary tensors, one after the other.
  bool read(Text list, Text behind) {
    int lists = 0;
    bool good = object([&](Text key) {
      if (key == list) return ++lists == 1 && tensors(found_.tensors, &found_.beginnings);
      if (key == "outputs") return asked();
      skip_space();
      if (key != "id" || now() != '"') return skip_value();
      Text id;
      return string(id) && unescape(id, found_.id);
    });
    skip_space();
    if (!good || lists != 1 || at_ != text_.size()) return false;
    for (Tensor& each : found_.tensors) {
      if (each.binary < 0) continue;
      if (each.form != Form::kAbsent || static_cast<uint64_t>(each.binary) > behind.size()) return false;
      each.form = Form::kRaw;
      each.data = behind.substr(0, static_cast<size_t>(each.binary));
      behind.remove_prefix(each.data.size());
    }
    return behind.empty();
  }

 private:
  bool tensors(std::vector<Tensor>& into, std::deque<Beginning>* beginnings = nullptr) {
    if (!take('[')) return false;
    if (take(']')) return true;
    do {
      skip_space();
      if (beginnings != nullptr && beginnings->size() == into.size()) beginnings->emplace_back();
      Beginning* before = beginnings == nullptr ? nullptr : &(*beginnings)[into.size()];
      if (!tensor(into.emplace_back(), before)) return false;
    } while (take(','));
    return take(']');
  }

  // The outputs that a request asks for.
  bool asked() {
    std::vector<Tensor> outputs;
    if (!tensors(outputs)) return false;
    for (const Tensor& each : outputs) {
      if (each.classified) found_.classified.emplace_back(each.name);
    }
    return true;
  }

  bool tensor(Tensor& known, Beginning* before) {
    constexpr unsigned kFixed = 1 | 2 | 4;
    unsigned seen = 0;
    size_t first = at_;
    auto once = [&](unsigned bit) { return (seen & bit) == 0 && (seen |= bit); };
    auto member = [&](Text key) {
      Text text;
      if (key == "name") return once(1) && string(text) && name(text, known);
      if (key == "datatype") {
        if (!once(2) || !string(text)) return false;
        known.kind = kind_of(text);
        return true;
      }
      if (key == "shape") return once(4) && shape(known);
      if (seen == kFixed && before != nullptr) keep(text_.substr(first, static_cast<size_t>(key.data() - 1 - text_.data()) - first), known, *before);
      if (key == "parameters") return once(8) && parameters(known);
      if (key != "data") return skip_value();
      skip_space();
      size_t list = at_;
      known.form = Form::kJson;
      bool good = once(16) && now() == '[' && skip_value();
      known.data = text_.substr(list, at_ - list);
      return good;
    };
    if (before == nullptr || before->text.empty() || text_.compare(at_, before->text.size(), before->text) != 0) {
      return object(member);
    }
    at_ += before->text.size();
    known = before->tensor;
    seen = kFixed;
    return members(member);
  }

  // Remembers the beginning of a tensor, up to the name of its first member that is not alike in all requests.
  void keep(Text text, const Tensor& known, Beginning& before) {
    if (before.text == text || known.name.data() < text.data() || known.name.data() >= text.data() + text.size()) return;
    before.text = text;
    before.tensor = known;
    before.tensor.name = Text(before.text).substr(static_cast<size_t>(known.name.data() - text.data()), known.name.size());
  }

  bool name(Text text, Tensor& known) {
    known.name = text;
    if (text.find('\\') == Text::npos) return true;
    std::string plain;
    if (!unescape(text, plain)) return false;
    known.name = found_.names.emplace_back(std::move(plain));
    return true;
  }

  bool shape(Tensor& known) {
    if (!take('[')) return false;
    if (take(']')) return true;
    do {
      int64_t size = 0;
      if (!integer(size) || !known.add_size(size)) return false;
    } while (take(','));
    return take(']');
  }

  bool parameters(Tensor& known) {
    return object([&](Text key) {
      if (key == "binary_data_size") return known.binary < 0 && integer(known.binary);
      known.classified |= key == "classification";
      return skip_value();
    });
  }

  // A size: digits alone.
  bool integer(int64_t& value) {
    skip_space();
    Text digits = word();
    value = 0;
    for (char each : digits) {
      if (each < '0' || each > '9') return false;
      value = value * 10 + (each - '0');
    }
    return !digits.empty() && digits.size() < 16;
  }

  Message& found_;
};

constexpr Field kAnswerTensor[kMostFields + 1] = {{}, {kText}, {kText}, {kVarints}, {kMessages, kEntry}, {kMessage}};
constexpr Field kAnswer[kMostFields + 1] = {{}, {kText}, {kText}, {kText}, {kMessages, kEntry}, {kMessages}, {kBlobs}};

inline bool read_tensor(Text bytes, Tensor& known) {
  return read_message(bytes, kAnswerTensor, [&](uint32_t number, Text content) {
    if (number == 1) known.name = content;
    if (number == 2) known.kind = kind_of(content);
    uint64_t size = 0;
    for (size_t at = 0; number == 3 && at < content.size();) {
      if (!read_varint(content, at, size) || !known.add_size(static_cast<int64_t>(size))) return false;
    }
    if (number == 5) known.form = Form::kContents, known.data = content;
    return true;
  });
}

// Whether an output is asked for as classes.
inline bool is_classified(Text output, Text& name) {
  bool found = false;
  read_message(output, kOutput, [&](uint32_t number, Text content) {
    if (number == 1) name = content;
    if (number != 2) return true;
    return read_message(content, kEntry, [&](uint32_t inner, Text key) {
      found = found || (inner == 1 && key == "classification");
      return true;
    });
  });
  return found;
}

// Inputs, outputs and raw contents are fields 5, 6 and 7 of a request, outputs and raw contents 5 and 6 of an answer.
inline bool read_grpc(Text bytes, bool request, Message& found) {
  std::vector<Text> raw;
  bool good = read_message(bytes, request ? kRequest : kAnswer, [&](uint32_t number, Text content) {
    if (number == 3) found.id = content;
    if (number == 5) {
      found.tensors.emplace_back();
      return read_tensor(content, found.tensors.back());
    }
    Text name;
    if (request && number == 6 && is_classified(content, name)) found.classified.emplace_back(name);
    if (number == (request ? 7u : 6u)) raw.push_back(content);
    return true;
  });
  if (!good || raw.empty()) return good;
  if (raw.size() != found.tensors.size()) return false;
  for (size_t place = 0; place < raw.size(); ++place) {
    Tensor& each = found.tensors[place];
    if (each.form != Form::kAbsent && !each.data.empty()) return false;
    each.form = Form::kRaw, each.data = raw[place];
  }
  return true;
}

}  // namespace serin
