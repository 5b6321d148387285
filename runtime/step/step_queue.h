// Steps that come at the same time. One begins at once while a core is free for it; where all are
// busy steps wait, and of those that wait, all on one prefix and layer are run as one batch, whose
// searches read codes and keys once. So nobody waits who could have begun, and the fuller the
// machine, the more is read together.
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
  // The steps that one caller asks for; a batch of sessions stays together.
  struct Call {
    std::vector<GroupTask> tasks;

    // Of the queue.
    std::vector<GroupTask::Key> keys;  // of the tasks, ascending, each once
    bool done = false;
    std::vector<Call*> leads;  // calls that this one's thread is to run
    std::condition_variable changed;
  };
  using Note = std::function<void()>;
  // Runs the tasks, in an order of its own, and says of each that it is done: then its core is free. Does not throw.
  using Runner = std::function<void(std::span<GroupTask*> tasks, const Note& task_done)>;

  // cores: tasks that run at once, at least 1.
  StepQueue(size_t cores, Runner run) : cores_(cores), run_(std::move(run)) {}

  // Returns when the call's tasks are done, by this thread or another's.
  void Run(Call& call);
  uint64_t joined() const;  // calls that were run in a batch with another's, since the start
  size_t waiting() const;   // calls, now

 private:
  static bool Related(const Call& a, const Call& b);
  // Lets calls begin as long as a core is free. mutex_ is held.
  void Dispatch() noexcept;

  const size_t cores_;
  const Runner run_;
  mutable std::mutex mutex_;
  size_t busy_ = 0;  // tasks begun and not done
  uint64_t joined_ = 0;
  std::deque<Call*> waiting_;  // in order of arrival
};

}  // namespace prefixd
