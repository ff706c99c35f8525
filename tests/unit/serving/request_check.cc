// Reads texts, each behind its length (4 bytes, little endian), and says what the gateway's filter would say of them: one
// line for each as JSON, one as a message. Every text has a block of its own, so that a read beyond it is seen.

#include <cstdio>
#include <cstring>
#include <memory>

#include "faults.h"

int main() {
  uint32_t length = 0;
  while (std::fread(&length, 4, 1, stdin) == 1) {
    std::unique_ptr<char[]> block(new char[length]);
    if (std::fread(block.get(), 1, length, stdin) != length) return 2;
    serin::Text text(block.get(), length);
    serin::Named named = serin::name_and_version(text);
    std::printf("%s\n%s\n%zu %zu\n", serin::json_fault(text, text.size(), 100).c_str(),
                serin::message_fault(text, text.size()).c_str(), named.model.size(), named.version.size());
  }
  return 0;
}
