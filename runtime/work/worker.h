// One thread in the background that does pieces of work, one after the other, as its owner hands
// them out.
//
// The owner guards its own state with mutex(), and waits on changed() for what a piece brings
// about. Declare a Worker behind everything that its pieces use: it starts at once.
//
// Thread-safety: all methods may be called concurrently; Stop ends the thread when the piece under
// way has ended, and may be called again.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>

#include "runtime/work/thread_pool.h"

namespace prefixd {

class Worker {
 public:
  using Clock = std::chrono::steady_clock;
  struct Next {
    // Done without the mutex; does not throw. Empty: there is nothing to do now.
    std::function<void(const std::stop_token&)> piece;
    // When to ask again, unless changed() is notified before.
    Clock::time_point again = Clock::time_point::max();
  };
  // Called with the mutex held.
  using Take = std::function<Next()>;

  Worker(WorkPriority priority, Take take);
  ~Worker() { Stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::mutex& mutex() const { return mutex_; }
  // Notified when a piece has ended or the worker stops; notify it when there is something to do.
  std::condition_variable& changed() { return changed_; }
  // The mutex is held.
  bool stopping() const { return stop_.stop_requested(); }
  // For pieces that pause: false when it is time to stop.
  bool Sleep(std::chrono::nanoseconds pause);
  void Stop();

 private:
  void Loop();

  const Take take_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::stop_source stop_;
  std::thread thread_;
};

}  // namespace prefixd
