// Runs loops over independent pieces of work (attention groups, heads) on a small pool of threads.
//
// Thread-safety: ParallelFor may be called from any number of threads at once; bodies must not
// call ParallelFor themselves.
#pragma once

#include <sched.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "prefixd/result.h"

namespace prefixd {

// Selects the workers: steps and background work have their own. Background workers yield the cores
// to all other threads.
enum class WorkPriority : uint8_t { kStep = 0, kBackground = 1 };

// Lets all other threads go before the calling thread on its core, for the rest of its life.
void YieldToOthers();

class ThreadPool {
 public:
  // threads: threads for steps, including the calling one; so threads - 1 workers start for steps,
  // and as many for background work. 0: one per core.
  explicit ThreadPool(uint32_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Runs body(0) ... body(n - 1), some on the caller's thread, all of them under its call's limits
  // (base/call_scope.h), and returns when all are done; an item does not begin once the call ends.
  // Returns the first error, including what a body throws (base/capture_errors.h); items not begun
  // by then are skipped.
  Status ParallelFor(size_t n, const std::function<Status(size_t)>& body,
                     WorkPriority priority = WorkPriority::kStep);

  uint32_t threads() const { return static_cast<uint32_t>(workers_.size()) + 1; }

 private:
  struct Job;

  void WorkerLoop(WorkPriority priority);
  // Restricts the workers of steps to the cores of background work without `core`, unless there are
  // more workers than other cores. mutex_ is held.
  void KeepOff(int core);
  // Runs one item of `job`; `lock` is held on entry and exit.
  void RunOne(std::shared_ptr<Job> job, std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable work_[2];             // by priority
  std::deque<std::shared_ptr<Job>> queues_[2];  // by priority; jobs with items not yet begun
  bool stopping_ = false;
  size_t running_ = 0;   // running step loops
  int left_out_ = -1;    // the core that workers keep off; -1: none
  cpu_set_t allowed_{};  // the process's cores when that was set
  std::vector<std::thread> workers_, background_;
};

}  // namespace prefixd
