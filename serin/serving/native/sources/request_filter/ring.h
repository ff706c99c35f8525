// Where recorded requests wait for the recorder: one file in memory for each of Envoy's workers, which writes it, and
// which the recorder reads (serin/formats/serving/ring.py). It is allocated whole before the first request is kept, so
// that memory that runs out later ends nothing, and its content outlives Envoy. An entry counts once `head` is behind it.

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
constexpr std::chrono::seconds kRetry(5);

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
  Ring(const std::string& folder, const std::string& name, size_t capacity)
      : path_(folder + "/" + name), scratch_(folder + "/." + name), capacity_(capacity) {}
  Ring(const Ring&) = delete;

  // What waits in the file stays there for the recorder; a file that never held anything goes.
  ~Ring() {
    if (header_ != nullptr) {
      if (header_->head == 0 && header_->drawn == 0) ::unlink(path_.c_str());
      ::munmap(header_, kPageBytes + capacity_);
    }
    close();
  }

  // Makes the file if there is none yet. Where there is no room, what is drawn is counted as lost, and it is tried again.
  void open() {
    auto now = std::chrono::steady_clock::now();
    if (header_ != nullptr || (failed_ != 0 && now - tried_ < kRetry)) return;
    int before = failed_;
    tried_ = now, failed_ = make();
    if (failed_ == 0) return;
    ::unlink(scratch_.c_str());
    close();
    std::string problem = "requests are not recorded: " + path_ + ": " + std::strerror(failed_);
    if (failed_ != before) envoy_dynamic_module_callback_log(kWarning, {problem.data(), problem.size()});
  }

  // Of one entry, whole.
  size_t largest() const { return capacity_ / kLargestShare; }

  // Copies of requests that are not answered yet. False: there are too many, or there is no file.
  bool reserve(size_t bytes) {
    if (header_ == nullptr || pending_ + bytes > capacity_) return false;
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

  // One whose bytes were not kept: too many, or there was no file when it came. `texts` names it.
  void write_lost(const Texts& texts) {
    add(header().drawn);
    lose(texts, header().large, &Losses::large);
  }

 private:
  struct Losses {  // of a release, that no entry has told yet
    std::string model;
    int32_t full = 0, large = 0;
  };

  // Of the file, or what counts until there is one.
  RingHeader& header() { return header_ != nullptr ? *header_ : early_; }

  // Returns an error's number. The file has its name once it is locked and complete.
  int make() {
    size_t size = kPageBytes + capacity_;
    struct statfs place;
    file_ = ::open(scratch_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file_ < 0 || ::flock(file_, LOCK_EX | LOCK_NB) != 0 || ::fstatfs(file_, &place) != 0) return errno;
    if (place.f_bavail < size / static_cast<size_t>(place.f_bsize)) return ENOSPC;  // others need what is left
    if (int failed = ::posix_fallocate(file_, 0, static_cast<off_t>(size))) return failed;
    void* found = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
    if (found == MAP_FAILED) return errno;
    ::madvise(found, size, MADV_DONTDUMP);
    auto* made = new (found) RingHeader{};
    std::memcpy(made->magic, "SerinRg1", 8);
    made->capacity = capacity_;
    made->drawn = early_.drawn.load(), made->large = early_.large.load();
    if (::rename(scratch_.c_str(), path_.c_str()) != 0) {
      int failed = errno;
      ::munmap(found, size);
      return failed;
    }
    header_ = made;
    data_ = static_cast<char*>(found) + kPageBytes;
    return 0;
  }

  void close() {
    if (file_ >= 0) ::close(file_);
    file_ = -1;
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

  const std::string path_, scratch_;
  const size_t capacity_;
  int file_ = -1, failed_ = 0;
  std::chrono::steady_clock::time_point tried_;
  RingHeader early_{};
  RingHeader* header_ = nullptr;
  char* data_ = nullptr;
  size_t pending_ = 0;
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
    if (problem.empty()) {
      forbid_dumps();
      for (uint32_t worker = 0; worker < workers; ++worker) {
        rings_.push_back(std::make_unique<Ring>(folder, boot + "-" + std::to_string(worker) + ".ring", capacity));
      }
      return;
    }
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
