// Where recorded requests wait for the recorder: one file in memory for each of Envoy's workers, which writes it, and
// which the recorder reads (serin/formats/serving/ring.py). It is allocated whole when Envoy starts, so that memory that
// runs out later ends nothing, and its content outlives Envoy. An entry counts once `head` is behind it.

#pragma once

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "entry.h"
#include "envoy_api.h"

namespace serin {

constexpr size_t kPageBytes = 4096;
constexpr size_t kLargestShare = 8;  // of a ring, that one entry may take: an eighth

struct RingHeader {
  char magic[8];
  uint64_t capacity;
  std::atomic<uint64_t> drawn, full, large;
  alignas(64) std::atomic<uint64_t> head;  // bytes ever written
  alignas(64) std::atomic<uint64_t> tail;  // bytes ever released by the reader
};
static_assert(offsetof(RingHeader, drawn) == 16 && offsetof(RingHeader, head) == 64);
static_assert(offsetof(RingHeader, tail) == 128 && std::atomic<uint64_t>::is_always_lock_free);

using Texts = std::string_view[kTexts];  // release, arm, id, client id, model, request, answer

class Ring {
 public:
  Ring(const Ring&) = delete;

  // Null, and why, where there is no room. The file has its name once it is locked and complete.
  static std::unique_ptr<Ring> make(const std::string& folder, const std::string& name, size_t capacity,
                                    std::string& problem) {
    std::unique_ptr<Ring> ring(new Ring);
    std::string scratch = folder + "/." + name;
    ring->path_ = folder + "/" + name;
    ring->file_ = ::open(scratch.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    int failed = ring->file_ < 0 ? errno : ring->fill(capacity);
    if (failed == 0 && ::rename(scratch.c_str(), ring->path_.c_str()) != 0) failed = errno;
    if (failed == 0) return ring;
    problem = ring->path_ + ": " + std::strerror(failed);
    ::unlink(scratch.c_str());
    return nullptr;
  }

  // What waits in the file stays there for the recorder; a file that never held anything goes.
  ~Ring() {
    if (header_ != nullptr) {
      if (header_->head == 0 && header_->drawn == 0) ::unlink(path_.c_str());
      ::munmap(header_, kPageBytes + capacity_);
    }
    if (file_ >= 0) ::close(file_);
  }

  // Of one entry, whole.
  size_t largest() const { return capacity_ / kLargestShare; }

  // Copies of requests that are not answered yet. False: there are too many.
  bool reserve(size_t bytes) {
    if (pending_ + bytes > capacity_) return false;
    pending_ += bytes;
    return true;
  }

  void release(size_t bytes) { pending_ -= bytes; }

  // A request that should be recorded. What was lost before is said once there is room again.
  void write(EntryHead head, const Texts& texts) {
    add(header_->drawn);
    if (size_of(texts) > largest()) {
      lose(texts, header_->large, &Losses::large);
    } else if (put(head, kRecorded, texts)) {
      tell_losses();
    } else {
      lose(texts, header_->full, &Losses::full);
    }
  }

  // One whose bytes were too many to keep: `texts` names it.
  void write_large(const Texts& texts) {
    add(header_->drawn);
    lose(texts, header_->large, &Losses::large);
  }

 private:
  struct Losses {  // of a release, that no entry has told yet
    std::string model;
    int32_t full = 0, large = 0;
  };

  Ring() = default;

  int fill(size_t capacity) {
    if (::flock(file_, LOCK_EX | LOCK_NB) != 0) return errno;
    int failed = ::posix_fallocate(file_, 0, static_cast<off_t>(kPageBytes + capacity));
    if (failed != 0) return failed;
    void* found = ::mmap(nullptr, kPageBytes + capacity, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (found == MAP_FAILED) return errno;
    ::madvise(found, kPageBytes + capacity, MADV_DONTDUMP);
    header_ = new (found) RingHeader{};
    data_ = static_cast<char*>(found) + kPageBytes;
    header_->capacity = capacity_ = capacity;
    std::memcpy(header_->magic, "SerinRg1", 8);
    return 0;
  }

  static size_t size_of(const Texts& texts) {
    size_t size = sizeof(EntryHead);
    for (std::string_view text : texts) size += text.size();
    return (size + 7) / 8 * 8;
  }

  void lose(const Texts& texts, std::atomic<uint64_t>& counter, int32_t Losses::*kind) {
    add(counter);
    Losses& losses = losses_[std::string(texts[0])];
    losses.model = texts[4];
    ++(losses.*kind);
  }

  void tell_losses() {
    while (!losses_.empty()) {
      auto& [release, losses] = *losses_.begin();
      EntryHead head{};
      head.code = losses.full;
      head.grpc = losses.large;
      if (!put(head, kLost, {release, "", "", "", losses.model, "", ""})) return;
      losses_.erase(losses_.begin());
    }
  }

  // False: there is no room.
  bool put(EntryHead head, EntryKind kind, const Texts& texts) {
    size_t size = size_of(texts);
    uint64_t begin = header_->head.load(std::memory_order_relaxed);
    uint64_t used = begin - header_->tail.load(std::memory_order_acquire);
    size_t place = begin % capacity_, left = capacity_ - place, skipped = size > left ? left : 0;
    if (used > capacity_ || skipped + size > capacity_ - used) return false;
    if (skipped > 0) {
      put_head(place, static_cast<uint32_t>(skipped), kFiller);
      place = 0;
    }
    head.size = static_cast<uint32_t>(size);
    head.kind = kind;
    char *to = data_ + place + sizeof(head), *end = data_ + place + size;
    for (size_t at = 0; at < kTexts; ++at) {
      head.lengths[at] = static_cast<uint32_t>(texts[at].size());
      to = std::copy(texts[at].begin(), texts[at].end(), to);
    }
    std::fill(to, end, '\0');
    std::memcpy(data_ + place, &head, sizeof(head));
    header_->head.store(begin + skipped + size, std::memory_order_release);
    return true;
  }

  void put_head(size_t place, uint32_t size, uint16_t kind) {
    std::memcpy(data_ + place, &size, sizeof(size));
    std::memcpy(data_ + place + sizeof(size), &kind, sizeof(kind));
  }

  // This worker is the only writer.
  static void add(std::atomic<uint64_t>& counter) {
    counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  std::string path_;
  int file_ = -1;
  RingHeader* header_ = nullptr;
  char* data_ = nullptr;
  size_t capacity_ = 0, pending_ = 0;
  std::map<std::string, Losses> losses_;
};

// One ring for each worker, or none.
class Rings {
 public:
  // `folder` must be in memory: what clients send is never written to a disk.
  Rings(const std::string& folder, size_t capacity, uint32_t workers) {
    std::string problem;
    struct statfs place;
    ::mkdir(folder.c_str(), 0700);
    if (::statfs(folder.c_str(), &place) != 0) {
      problem = folder + ": " + std::strerror(errno);
    } else if (place.f_type != TMPFS_MAGIC && place.f_type != RAMFS_MAGIC) {
      problem = folder + " is not in memory";
    }
    std::string boot = boot_name();
    for (uint32_t worker = 0; worker < workers && problem.empty(); ++worker) {
      rings_.push_back(Ring::make(folder, boot + "-" + std::to_string(worker) + ".ring", capacity, problem));
    }
    if (problem.empty()) {
      forbid_dumps();
      return;
    }
    rings_.clear();
    problem = "requests are not recorded: " + problem;
    envoy_dynamic_module_callback_log(kWarning, {problem.data(), problem.size()});
  }

  Ring* of(uint32_t worker) const { return worker < rings_.size() ? rings_[worker].get() : nullptr; }

 private:
  // Another for every process, and sorted by its age.
  static std::string boot_name() {
    using std::chrono::milliseconds, std::chrono::system_clock;
    auto now = std::chrono::duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
    char name[64];
    std::snprintf(name, sizeof(name), "%012llx-%d-%08x", static_cast<unsigned long long>(now),
                  static_cast<int>(::getpid()), std::random_device()());
    return name;
  }

  // This process holds what clients send.
  static void forbid_dumps() {
    struct rlimit none = {0, 0};
    ::setrlimit(RLIMIT_CORE, &none);
  }

  std::vector<std::unique_ptr<Ring>> rings_;
};

}  // namespace serin
