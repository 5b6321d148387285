#include "runtime/work/worker.h"

#include <utility>

#include "base/capture_errors.h"

namespace prefixd {
namespace {

constexpr std::chrono::milliseconds kUntilThereIsMemory(50);

}  // namespace

Worker::Worker(WorkPriority priority, Take take) : take_(std::move(take)) {
  thread_ = std::thread([this, priority] {
    if (priority == WorkPriority::kBackground) YieldToOthers();
    Loop();
  });
}

void Worker::Loop() {
  std::unique_lock lock(mutex_);
  while (!stopping()) {
    Next next;
    const Status taken = CaptureErrors([&]() -> Status {
      next = take_();
      return {};
    });
    if (!taken.ok()) {
      changed_.wait_for(lock, kUntilThereIsMemory);
    } else if (next.piece) {
      lock.unlock();
      static_cast<void>(CaptureErrors([&]() -> Status {
        next.piece(stop_.get_token());
        return {};
      }));
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
