// Reads texts, each behind its length (4 bytes, little endian), and says what the gateway's filter makes of them, in four
// lines: what is wrong with it as JSON; then what it reads in it as a ModelInferRequest, and as a ModelReadyRequest, or
// what is wrong with that; then the JSON with its nulls written out, in hex, or nothing when it stays as it is, or a
// "!" and why it is refused. Every text has a block of its own, so that a read beyond it is seen.

#include <cstdio>
#include <cstring>
#include <memory>

#include "json_data.h"
#include "message.h"

using serin::Text;

namespace {

std::string hex(Text text) {
  std::string found;
  char digits[3];
  for (unsigned char byte : text) std::snprintf(digits, sizeof(digits), "%02x", byte), found += digits;
  return found;
}

std::string sizes(Text packed) {
  std::string found;
  uint64_t size = 0;
  for (size_t at = 0; serin::read_varint(packed, at, size);) found += std::to_string(int64_t(size)) + ",";
  return found;
}

std::string input(Text bytes) {
  std::string name, type, shape;
  serin::read_message(bytes, serin::kInput, [&](uint32_t number, Text content) {
    if (number == 1) name = hex(content);
    if (number == 2) type = hex(content);
    if (number == 3) shape += sizes(content);
    return true;
  });
  if (!shape.empty()) shape.pop_back();
  return name + "/" + type + "/" + shape;
}

std::string believed(Text message, bool tensors) {
  serin::Named named;
  std::string fault = serin::message_fault(message, tensors, message.size(), named);
  if (!fault.empty()) return fault;
  std::string found = hex(named.model) + " " + hex(named.version), inputs, raw;
  if (!tensors) return found;
  serin::read_message(message, serin::kRequest, [&](uint32_t number, Text content) {
    if (number == 5) inputs += input(content) + ";";
    if (number == 7) raw += std::to_string(content.size()) + ",";
    return true;
  });
  if (!inputs.empty()) inputs.pop_back();
  if (!raw.empty()) raw.pop_back();
  return found + " " + inputs + " " + raw;
}

std::string written_out(Text text) {
  serin::DataRewriter data(text, 5 * text.size());
  bool changed = data.rewrite();
  return changed ? hex(data.result) : data.fault.empty() ? "" : "!" + data.fault;
}

}  // namespace

int main() {
  uint32_t length = 0;
  while (std::fread(&length, 4, 1, stdin) == 1) {
    std::unique_ptr<char[]> block(new char[length]);
    if (std::fread(block.get(), 1, length, stdin) != length) return 2;
    Text text(block.get(), length);
    std::printf("%s\n%s\n%s\n%s\n", serin::json_fault(text, text.size(), 100).c_str(), believed(text, true).c_str(),
                believed(text, false).c_str(), written_out(text).c_str());
  }
  return 0;
}
