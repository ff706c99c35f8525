// Threads that share the pieces of one job with the thread that has it.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace native {

class Workers {
 public:
  // `count` threads work at a time, the caller among them.
  explicit Workers(size_t count) {
    try {
      for (size_t left = count; left > 1; --left) threads_.emplace_back([this] { serve(); });
    } catch (...) {
      end();
      throw;
    }
  }
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;
  ~Workers() { end(); }

  // Calls `work(piece)` for each, and returns when all are done. Throws what one of them threw.
  void each(size_t pieces, const std::function<void(size_t)>& work) {
    if (pieces <= 1 || threads_.empty()) {
      for (size_t piece = 0; piece < pieces; ++piece) work(piece);
      return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    work_ = &work, next_ = 0, pieces_ = pieces, left_ = pieces, fault_ = nullptr;
    wake_.notify_all();
    take(lock);
    done_.wait(lock, [this] { return left_ == 0; });
    work_ = nullptr;
    if (fault_) std::rethrow_exception(std::exchange(fault_, nullptr));
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return ending_ || (work_ != nullptr && next_ < pieces_); });
      if (ending_) return;
      take(lock);
    }
  }

  // Takes pieces while there are any. The lock is held, but not during the work.
  void take(std::unique_lock<std::mutex>& lock) {
    while (next_ < pieces_) {
      size_t piece = next_++;
      const std::function<void(size_t)>& work = *work_;
      std::exception_ptr fault;
      lock.unlock();
      try {
        work(piece);
      } catch (...) {
        fault = std::current_exception();
      }
      lock.lock();
      if (fault && !fault_) fault_ = fault;
      if (--left_ == 0) done_.notify_all();
    }
  }

  void end() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  const std::function<void(size_t)>* work_ = nullptr;
  size_t next_ = 0, pieces_ = 0, left_ = 0;
  std::exception_ptr fault_;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace native
