// The thread that writes recorded requests (spool.h) to files, and the counters of what was lost.
#pragma once

#include "spool.h"

namespace native {

class Spool {
 public:
  // `folder`: of the release. Each writer has a folder inside, and each file in it a number.
  Spool(const Settings& settings, const std::string& folder)
      : settings_(settings), root_(folder), own_(root_ / writer_name()), filling_(settings_), writing_(settings_) {
    thread_ = std::thread([this] { run(); });
  }
  Spool(const Spool&) = delete;
  Spool& operator=(const Spool&) = delete;

  // Writes what is left.
  ~Spool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    wake_.notify_one();
    thread_.join();
  }

  bool draws(std::string_view id) const { return !id.empty() && double(lot(id)) < settings_.recording.share * 4294967296.0; }

  void add(Scored scored) noexcept {
    scored.id = scored.id.substr(0, kLongestId);
    scored.client_id = scored.client_id.substr(0, kLongestId);
    bool wake = false;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ++sent_;
      try {
        dropped_ += !filling_.add(scored, kMostBytes);
      } catch (const std::exception&) {
        ++dropped_;  // no memory
      }
      wake = filling_.bytes() > kWakeBytes;
    }
    if (wake) wake_.notify_one();
  }

 private:
  static std::string writer_name() {
    auto now = std::chrono::system_clock::now().time_since_epoch();
    char name[64];
    std::snprintf(name, sizeof name, "%012lld-%ld-%08x", static_cast<long long>(std::chrono::duration_cast<std::chrono::milliseconds>(now).count()),
                  static_cast<long>(getpid()), static_cast<unsigned>(std::random_device()()));
    return name;
  }

  void run() {
    std::unique_lock<std::mutex> lock(mutex_);
    bool last = false;
    while (!last) {
      wake_.wait_for(lock, kInterval, [this] { return stop_ || filling_.bytes() > kWakeBytes; });
      last = stop_;
      std::swap(filling_, writing_);
      uint64_t sent = sent_, dropped = dropped_;
      lock.unlock();
      size_t lost = write(sent, dropped) ? 0 : writing_.requests();
      writing_.clear();
      lock.lock();
      dropped_ += lost;
    }
  }

  // False when the requests are lost.
  bool write(uint64_t sent, uint64_t dropped) {
    if (writing_.requests() == 0 && sent == reported_sent_ && dropped == reported_dropped_) return true;
    std::string problem;
    try {
      problem = try_to_write(sent, dropped);
    } catch (const std::exception& error) {
      problem = error.what();
    }
    if (problem.empty()) {
      reported_sent_ = sent, reported_dropped_ = dropped;
      return true;
    }
    report(problem);
    return false;
  }

  // Logs a new problem at once, and one that lasts every minute.
  void report(const std::string& problem) {
    auto now = std::chrono::steady_clock::now();
    if (problem == problem_ && now - logged_ < kLogInterval) return;
    problem_ = problem, logged_ = now;
    std::string text = "recorded requests are dropped: " + problem;
    if (TRITONSERVER_Error* error = TRITONSERVER_LogMessage(triton::kLogWarning, __FILE__, __LINE__, text.c_str())) {
      TRITONSERVER_ErrorDelete(error);
    }
  }

  // Empty when the file is there, else what is wrong.
  std::string try_to_write(uint64_t sent, uint64_t dropped) {
    namespace fs = std::filesystem;
    std::string head = settings_.recording.header + writing_.head(sent, dropped);
    if (used() + head.size() + writing_.bytes() > settings_.recording.limit) {
      return root_.string() + " holds " + std::to_string(settings_.recording.limit) + " bytes already; is the recorder running?";
    }
    for (const fs::path& folder : {root_.parent_path(), root_, own_}) {
      if (::mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) return folder.string() + ": " + std::strerror(errno);
    }
    char number[32];
    std::snprintf(number, sizeof number, "%08llu", static_cast<unsigned long long>(next_));
    fs::path open = own_ / (std::string(number) + ".open"), complete = own_ / (std::string(number) + ".rows");
    int file = ::open(open.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file < 0) return open.string() + ": " + std::strerror(errno);
    bool whole = ::flock(file, LOCK_EX | LOCK_NB) == 0;  // until it is closed: the recorder sees that its writer lives
    whole = whole && write_all(file, head);
    for (std::string_view piece : writing_.pieces()) whole = whole && write_all(file, piece);
    int fault = whole ? 0 : errno;
    if (::close(file) != 0 && fault == 0) fault = errno;
    if (fault == 0 && ::rename(open.c_str(), complete.c_str()) != 0) fault = errno;
    if (fault != 0) {
      ::unlink(open.c_str());
      return open.string() + ": " + std::strerror(fault);
    }
    ++next_;
    return "";
  }

  // The bytes of all writers of this release.
  size_t used() const {
    namespace fs = std::filesystem;
    size_t bytes = 0;
    std::error_code fault;
    for (fs::recursive_directory_iterator at(root_, fault), end; !fault && at != end; at.increment(fault)) {
      std::error_code gone;  // the recorder deletes files
      auto size = at->is_regular_file(gone) ? at->file_size(gone) : 0;
      if (!gone) bytes += size;
    }
    return bytes;
  }

  static bool write_all(int file, std::string_view data) {
    while (!data.empty()) {
      ssize_t done = ::write(file, data.data(), data.size());
      if (done < 0 && errno == EINTR) continue;
      if (done == 0) errno = EIO;
      if (done <= 0) return false;
      data.remove_prefix(size_t(done));
    }
    return true;
  }

  const Settings settings_;
  const std::filesystem::path root_, own_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Rows filling_, writing_;  // guarded by the mutex; of the thread
  uint64_t sent_ = 0, dropped_ = 0;
  bool stop_ = false;
  uint64_t next_ = 1, reported_sent_ = 0, reported_dropped_ = 0;  // of the thread
  std::string problem_;
  std::chrono::steady_clock::time_point logged_{};
  std::thread thread_;  // last: it uses the others
};

}  // namespace native
