// Runs one function on all threads of a fixed team, with little delay between runs.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

namespace prefixd::bench {

// The caller is member 0. Members spin for their next job, which suits measurements and no server.
class Team {
 public:
  explicit Team(unsigned size) {
    for (unsigned i = 1; i < size; ++i) threads_.emplace_back([this] { Serve(); });
  }
  ~Team() {
    stop_ = true;
    ++round_;
    for (std::thread& thread : threads_) thread.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  unsigned size() const { return static_cast<unsigned>(threads_.size()) + 1; }

  // Calls job(item) for each item in [0, n); members take items as they become free.
  void ForEach(size_t n, const std::function<void(size_t)>& job) {
    job_ = &job;
    n_ = n;
    next_ = 0;
    busy_ = static_cast<unsigned>(threads_.size());
    ++round_;
    Work();
    while (busy_.load(std::memory_order_acquire) > 0) std::this_thread::yield();
  }

 private:
  void Work() {
    for (size_t item = next_++; item < n_; item = next_++) (*job_)(item);
  }
  void Serve() {
    for (uint64_t seen = 0;;) {
      while (round_.load(std::memory_order_acquire) == seen) std::this_thread::yield();
      ++seen;
      if (stop_) return;
      Work();
      --busy_;
    }
  }

  std::vector<std::thread> threads_;
  const std::function<void(size_t)>* job_ = nullptr;
  size_t n_ = 0;
  std::atomic<size_t> next_{0};
  std::atomic<unsigned> busy_{0};
  std::atomic<uint64_t> round_{0};
  std::atomic<bool> stop_{false};
};

}  // namespace prefixd::bench
