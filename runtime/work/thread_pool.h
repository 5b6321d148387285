// A small pool for loops over independent pieces of work (attention groups, heads).
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

// Steps and background work have workers of their own; those of background work yield the cores to
// whoever else wants them.
enum class WorkPriority : uint8_t { kStep = 0, kBackground = 1 };

// The calling thread gives way to all others that want its core, for the rest of its life.
void YieldToOthers();

class ThreadPool {
 public:
  // threads: for steps including the calling thread, so threads - 1 workers are started for them,
  // and as many for background work; 0: one per core.
  explicit ThreadPool(uint32_t threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Runs body(0) ... body(n - 1), some on the caller's thread, and returns when all are done. The
  // first error is returned, what a body throws among them (base/caught.h); items not yet begun
  // by then are skipped.
  Status ParallelFor(size_t n, const std::function<Status(size_t)>& body,
                     WorkPriority priority = WorkPriority::kStep);

  uint32_t threads() const { return static_cast<uint32_t>(workers_.size()) + 1; }

 private:
  struct Job;

  void WorkerLoop(WorkPriority priority);
  // The workers of steps may run wherever those of background work may, but on `core`, unless there
  // are more of them than other cores. mutex_ is held.
  void KeepOff(int core);
  // Runs one item of `job`; `lock` is held on entry and exit.
  void RunOne(std::shared_ptr<Job> job, std::unique_lock<std::mutex>& lock);

  std::mutex mutex_;
  std::condition_variable work_[2];             // by priority
  std::deque<std::shared_ptr<Job>> queues_[2];  // by priority; jobs with items not yet begun
  bool stopping_ = false;
  size_t running_ = 0;   // loops of steps
  int left_out_ = -1;    // the core that workers keep off; -1: none
  cpu_set_t allowed_{};  // what the process may use, when that was set
  std::vector<std::thread> workers_, background_;
};

}  // namespace prefixd
