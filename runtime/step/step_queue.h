// Schedules steps that arrive at the same time. A step begins at once while a core is free for it.
// Where all cores are busy steps wait, and all waiting steps on one prefix and layer run as one
// batch, whose searches read codes and keys once. So no step waits that could have begun, and the
// fuller the machine, the more steps share their reads.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <span>
#include <utility>
#include <vector>

#include "runtime/step/step.h"

namespace prefixd {

class StepQueue {
 public:
  // The steps of one caller; a batch of sessions stays together.
  struct Call {
    std::vector<GroupTask> tasks;

    // The queue alone uses these.
    std::vector<GroupTask::Key> keys;  // the tasks' keys, ascending, each once
    bool done = false;
    std::vector<Call*> leads;  // calls that this call's thread must run
    std::condition_variable changed;
  };
  using Note = std::function<void()>;
  // Runs the tasks in any order, and calls task_done for each that ends, which frees its core. Does
  // not throw.
  using Runner = std::function<void(std::span<GroupTask*> tasks, const Note& task_done)>;

  // cores: tasks that run at once, at least 1.
  StepQueue(size_t cores, Runner run) : cores_(cores), run_(std::move(run)) {}

  // Returns when the call's tasks are done, by this thread or another's. A call whose tasks are all
  // to end leaves the queue as long as none has begun; once begun they end each by itself, and a
  // call that leads others returns with the last of theirs.
  void Run(Call& call);
  uint64_t joined() const;  // calls since the start that ran in a batch with another call
  size_t waiting() const;   // calls

 private:
  static bool Related(const Call& a, const Call& b);
  // Takes the call out of the queue if all its tasks are to end. mutex_ is held.
  bool LeaveEarly(Call& call);
  // Starts calls as long as a core is free. mutex_ is held.
  void Dispatch() noexcept;

  const size_t cores_;
  const Runner run_;
  mutable std::mutex mutex_;
  size_t busy_ = 0;  // tasks begun and not done
  uint64_t joined_ = 0;
  std::deque<Call*> waiting_;  // in order of arrival
};

}  // namespace prefixd
