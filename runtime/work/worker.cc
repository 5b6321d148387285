#include "runtime/work/worker.h"

#include <utility>

namespace prefixd {

Worker::Worker(WorkPriority priority, Take take) : take_(std::move(take)) {
  thread_ = std::thread([this, priority] {
    if (priority == WorkPriority::kBackground) YieldToOthers();
    Loop();
  });
}

void Worker::Loop() {
  std::unique_lock lock(mutex_);
  while (!stopping()) {
    const Next next = take_();
    if (next.piece) {
      lock.unlock();
      next.piece(stop_.get_token());
      lock.lock();
      changed_.notify_all();
    } else if (next.again == Clock::time_point::max()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, next.again);
    }
  }
}

bool Worker::Sleep(std::chrono::nanoseconds pause) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, pause, [this] { return stopping(); });
  return !stopping();
}

void Worker::Stop() {
  {
    std::lock_guard lock(mutex_);
    stop_.request_stop();
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace prefixd
