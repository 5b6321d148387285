// Reports a job's progress to whoever asked for the job.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <thread>

#include "prefixd/progress.h"
#include "runtime/work/work_progress.h"

namespace prefixd {

// Passes a job's progress on while it runs, and its end to the job when the listener asks for it.
class WorkReporter {
 public:
  WorkReporter(WorkProgress& work, const ProgressFn& progress, const char* unit)
      : work_(work), progress_(progress), unit_(unit) {
    if (progress_) {
      thread_ = std::jthread([this](const std::stop_token& stop) { Run(stop); });
    }
  }

 private:
  void Run(const std::stop_token& stop) {
    constexpr auto kEvery = std::chrono::milliseconds(100);
    std::mutex mutex;
    std::condition_variable_any changed;
    std::unique_lock lock(mutex);
    while (!stop.stop_requested()) {
      changed.wait_for(lock, stop, kEvery, [] { return false; });
      const uint64_t total = work_.total;
      if (total > 0 && !progress_(std::min(work_.done.load(), total), total, unit_)) {
        work_.cancelled = true;
        return;
      }
    }
  }

  WorkProgress& work_;
  const ProgressFn& progress_;
  const char* unit_;
  std::jthread thread_;
};

}  // namespace prefixd
