// What a caller of an I/O engine waits for: a group of operations, and how long it is ready to
// wait.
//
// Thread-safety: SetDeadline before Submit; everything else from any thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>

namespace prefixd::storage {

// Counts what is outstanding. Must outlive its operations: wait before destroying it, or submit
// with an owner (IoEngine::SubmitOwned).
class IoBatch {
 public:
  using Clock = std::chrono::steady_clock;

  IoBatch() = default;
  IoBatch(const IoBatch&) = delete;
  IoBatch& operator=(const IoBatch&) = delete;

  // For everything submitted to this batch from now on. time_point::max(), the default: none.
  void SetDeadline(Clock::time_point deadline) { deadline_ = deadline; }
  Clock::time_point deadline() const { return deadline_; }

  // Until nothing is outstanding, however long that takes; the deadline plays no part.
  void Wait();
  // False when something is still outstanding at `t`.
  bool WaitUntil(Clock::time_point t);

  // For engines. A Submit adds all its operations before the first one completes.
  void Add(size_t n);
  void Complete(size_t n);
  // Whether Complete(n) would wake whoever waits.
  bool EndsWith(size_t n) const;
  // Keeps `owner` until nothing is outstanding; then the completing thread lets go of it. Counts as
  // outstanding itself: Complete(1) once the operations are added.
  void Own(std::shared_ptr<const void> owner);
  bool owned() const;

 private:
  mutable std::mutex mutex_;
  std::condition_variable done_;
  size_t pending_ = 0;
  std::shared_ptr<const void> owner_;
  Clock::time_point deadline_ = Clock::time_point::max();
};

}  // namespace prefixd::storage
