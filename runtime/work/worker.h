// Runs pieces of background work in one thread, one after the other, as its owner hands them out.
//
// The owner guards its own state with mutex(), and waits on changed() for the effects of a piece.
// Declare a Worker after everything that its pieces use: it starts at once.
//
// Thread-safety: all methods may be called concurrently; Stop ends the thread when the running
// piece has ended, and may be called again.
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
    // Runs without the mutex. Empty: there is nothing to do now. Whoever waits for its effects
    // learns of lack of memory from the piece itself; what it throws is dropped.
    std::function<void(const std::stop_token&)> piece;
    // The time of the next Take, unless changed() is notified before.
    Clock::time_point again = Clock::time_point::max();
  };
  // Called with the mutex held. May throw std::bad_alloc when it has changed nothing; it is called
  // again after a while.
  using Take = std::function<Next()>;

  Worker(WorkPriority priority, Take take);
  ~Worker() { Stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  std::mutex& mutex() const { return mutex_; }
  // Notified when a piece has ended or the worker stops; owners notify it when there is work.
  std::condition_variable& changed() { return changed_; }
  // Call with the mutex held.
  bool stopping() const { return stop_.stop_requested(); }
  // Pauses a piece; false when the worker stops.
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
