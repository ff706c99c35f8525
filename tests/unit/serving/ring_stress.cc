// A writer and a reader of one ring at the same time, for the sanitizers: `ring_stress FOLDER REQUESTS CAPACITY`. The
// reader is slow from time to time. Every request must be read once, as it was written, or be counted as lost.

#include "ring.h"

#include <cstdlib>
#include <thread>

extern "C" {
void envoy_dynamic_module_callback_log(LogLevel, Span text) {
  std::fprintf(stderr, "%.*s\n", static_cast<int>(text.size), text.data);
}
}

namespace {

using namespace serin;

struct Seen {
  uint64_t requests = 0, full = 0, large = 0, fillers = 0;
};

void check(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

std::string filling(uint64_t number, size_t size) { return std::string(size, static_cast<char>('a' + number % 26)); }

size_t request_bytes(uint64_t number, size_t capacity) { return number * 2654435761u % (capacity / 6); }

void write(Ring& ring, uint64_t requests, size_t capacity) {
  for (uint64_t number = 0; number < requests; ++number) {
    std::string id = std::to_string(number), request = filling(number, request_bytes(number, capacity));
    EntryHead head{};
    head.epoch = static_cast<int64_t>(number);
    ring.write(head, {number % 3 ? "m-v1" : "m-v2", "stable", id, "", "m", request, id});
    if (number % 16 == 0) std::this_thread::yield();
  }
}

void read_entry(const char* at, const EntryHead& head, size_t capacity, Seen& seen) {
  if (head.kind == kLost) {
    seen.full += static_cast<uint64_t>(head.code), seen.large += static_cast<uint64_t>(head.grpc);
    return;
  }
  check(head.kind == kRecorded, "a kind that is known");
  uint64_t number = static_cast<uint64_t>(head.epoch);
  size_t size = sizeof(head);
  for (uint32_t length : head.lengths) size += length;
  check((size + 7) / 8 * 8 == head.size, "its size is that of its texts");
  const char* request = at + sizeof(head);
  for (size_t text = 0; text < 5; ++text) request += head.lengths[text];
  std::string wanted = filling(number, request_bytes(number, capacity)), id = std::to_string(number);
  check(std::string(request, head.lengths[5]) == wanted, "the request");
  check(std::string(request + head.lengths[5], head.lengths[6]) == id, "the answer");
  ++seen.requests;
}

void read(RingHeader& header, const std::atomic<bool>& ended, Seen& seen) {
  const char* data = reinterpret_cast<const char*>(&header) + kPageBytes;
  for (uint64_t at = 0;;) {
    bool last = ended.load();
    uint64_t head = header.head.load(std::memory_order_acquire);
    check(head - at <= header.capacity, "no more than fits");
    while (at < head) {
      EntryHead entry{};
      size_t place = at % header.capacity;
      std::memcpy(&entry, data + place, std::min(sizeof(entry), header.capacity - place));
      check(entry.size % 8 == 0 && entry.size > 0 && place + entry.size <= header.capacity, "an entry is whole");
      if (entry.kind == kFiller) {
        ++seen.fillers;
      } else {
        read_entry(data + place, entry, header.capacity, seen);
      }
      at += entry.size;
      header.tail.store(at, std::memory_order_release);
    }
    if (last && at == header.head.load()) return;
    if (at % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

}  // namespace

int main(int, char** given) {
  uint64_t requests = std::strtoull(given[2], nullptr, 10);
  size_t capacity = std::strtoull(given[3], nullptr, 10);
  std::string path = std::string(given[1]) + "/one.ring";
  Ring ring(given[1], "one.ring", capacity);
  ring.open();
  int file = ::open(path.c_str(), O_RDWR);
  void* found = ::mmap(nullptr, kPageBytes + capacity, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  check(found != MAP_FAILED, "the reader's view");
  auto& header = *static_cast<RingHeader*>(found);
  std::atomic<bool> ended{false};
  Seen seen;
  std::thread reader([&] { read(header, ended, seen); });
  write(ring, requests, capacity);
  ended = true;
  reader.join();
  check(header.drawn == requests && header.drawn == seen.requests + header.full + header.large, "each request counts once");
  check(seen.full <= header.full && seen.large <= header.large, "no loss is told twice");
  std::printf("%lu %lu %lu %lu\n", static_cast<unsigned long>(seen.requests), static_cast<unsigned long>(header.full),
              static_cast<unsigned long>(header.large), static_cast<unsigned long>(seen.fillers));
  return 0;
}
