// Reads the messages of gRPC that name a model, exactly as protobuf does, or refuses them. What is read here decides which
// key a request needs and where it goes; Triton reads the same bytes again. So everything that two readers could take
// differently is refused: a field that may be there once and comes twice (protobuf takes the last, or merges), a known
// field of another type (protobuf skips it), numbers and lengths that do not fit, field 0, groups, text that is not UTF-8.
// Fields that are not known are skipped, as protobuf does.

#pragma once

#include "faults.h"

namespace serin {

const std::string kUnreadable = "the message cannot be read";

enum Wire : uint32_t { kNumber = 0, kEightBytes = 1, kLength = 2, kFourBytes = 5 };  // how a field is written

enum Kind : uint8_t {  // what a field is; those on the first line may be there once
  kNothing, kText, kVarint, kDouble, kMessage,
  kMessages, kBlobs, kVarints, kFloats, kDoubles,
};

struct Field {
  Kind kind = kNothing;
  const Field* inner = nullptr;  // the fields of a message; none: the visitor looks into it
};

constexpr uint32_t kMostFields = 8;  // as many as the largest message has

// grpc_service.proto, by number.
constexpr Field kNames[kMostFields + 1] = {{}, {kText}, {kText}};
constexpr Field kParameter[kMostFields + 1] = {{}, {kVarint}, {kVarint}, {kText}, {kDouble}, {kVarint}};
constexpr Field kEntry[kMostFields + 1] = {{}, {kText}, {kMessage, kParameter}};
constexpr Field kContents[kMostFields + 1] = {
    {}, {kVarints}, {kVarints}, {kVarints}, {kVarints}, {kVarints}, {kFloats}, {kDoubles}, {kBlobs}};
constexpr Field kInput[kMostFields + 1] = {
    {}, {kText}, {kText}, {kVarints}, {kMessages, kEntry}, {kMessage, kContents}};
constexpr Field kOutput[kMostFields + 1] = {{}, {kText}, {kMessages, kEntry}};
constexpr Field kRequest[kMostFields + 1] = {
    {}, {kText}, {kText}, {kText}, {kMessages, kEntry}, {kMessages}, {kMessages, kOutput}, {kBlobs}};

inline bool may_be_written_as(Kind kind, uint32_t wire) {
  switch (kind) {
    case kNothing: return wire == kNumber || wire == kEightBytes || wire == kLength || wire == kFourBytes;
    case kVarint: return wire == kNumber;
    case kDouble: return wire == kEightBytes;
    case kVarints: return wire == kNumber || wire == kLength;
    case kFloats: return wire == kFourBytes || wire == kLength;
    case kDoubles: return wire == kEightBytes || wire == kLength;
    default: return wire == kLength;
  }
}

// Reads a number of at most `longest` bytes and less than 2^bits; false when there is none.
inline bool read_varint(Text bytes, size_t& at, uint64_t& value, int longest = 10, int bits = 64) {
  value = 0;
  for (int index = 0; index < longest && at < bytes.size(); ++index) {
    uint64_t byte = static_cast<unsigned char>(bytes[at++]);
    int shift = 7 * index, room = bits - shift;
    if (room < 7 && (byte & 127) >> room != 0) return false;
    value |= (byte & 127) << shift;
    if (byte < 128) return true;
  }
  return false;
}

inline bool are_varints(Text bytes) {
  uint64_t value = 0;
  for (size_t at = 0; at < bytes.size();) {
    if (!read_varint(bytes, at, value)) return false;
  }
  return true;
}

template <typename Visit>
bool read_message(Text bytes, const Field* known, Visit visit);

inline bool is_readable(const Field& field, uint32_t wire, Text content) {
  switch (field.kind) {
    case kText: return is_utf8(content);
    case kVarints: return wire == kNumber || are_varints(content);
    case kFloats: return content.size() % 4 == 0;
    case kDoubles: return content.size() % 8 == 0;
    case kMessage:
    case kMessages:
      return field.inner == nullptr || read_message(content, field.inner, [](uint32_t, Text) { return true; });
    default: return true;
  }
}

// Calls visit(number, content) for each field before it is looked into; false when this is not such a message, or a
// visit says so. The depth of the calls is that of the tables above, whatever is sent.
template <typename Visit>
bool read_message(Text bytes, const Field* known, Visit visit) {
  uint32_t seen = 0;
  for (size_t at = 0; at < bytes.size();) {
    uint64_t tag = 0, length = 0;
    if (!read_varint(bytes, at, tag, 5, 32)) return false;
    uint32_t number = static_cast<uint32_t>(tag >> 3), wire = tag & 7;
    const Field field = number <= kMostFields ? known[number] : Field{};
    if (number == 0 || !may_be_written_as(field.kind, wire)) return false;
    if (field.kind >= kText && field.kind <= kMessage) {
      if (seen >> number & 1) return false;
      seen |= 1u << number;
    }
    size_t from = at;
    if (wire == kNumber) {
      if (!read_varint(bytes, at, length)) return false;
      length = at - from;
    } else if (wire == kLength) {
      if (!read_varint(bytes, at, length, 5, 31)) return false;
      from = at;
    } else {
      length = wire == kEightBytes ? 8 : 4;
    }
    if (length > bytes.size() - from) return false;
    at = from + length;
    Text content = bytes.substr(from, length);
    if (!visit(number, content) || !is_readable(field, wire, content)) return false;
  }
  return true;
}

struct Named {
  Text model;
  Text version;
};

// "" when a message can be read without harm, and then whom it asks; else what is wrong with it. The first two fields of
// every message are the model and its version. Shape is field 3 of an input, a list of numbers, packed or one by one;
// `limit`: the bytes of the whole request.
inline std::string message_fault(Text message, bool tensors, size_t limit, Named& named) {
  bool fits = true;
  auto in_input = [&](double& count) {
    return [&](uint32_t number, Text sizes) {
      uint64_t size = 0;
      for (size_t at = 0; number == 3 && at < sizes.size();) {
        if (!read_varint(sizes, at, size)) return false;
        fits = fits && grow(count, static_cast<double>(size), static_cast<double>(limit));
      }
      return true;
    };
  };
  auto in_request = [&](uint32_t number, Text content) {
    double count = 1;
    if (number == 1) named.model = content;
    if (number == 2) named.version = content;
    return !tensors || number != 5 || read_message(content, kInput, in_input(count));
  };
  named = {};
  if (!read_message(message, tensors ? kRequest : kNames, in_request)) return kUnreadable;
  return fits ? "" : kTooLarge;
}

}  // namespace serin
