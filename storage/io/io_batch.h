// Lets a caller of an I/O engine wait for a group of operations, up to a deadline.
//
// Thread-safety: SetDeadline before Submit; everything else from any thread.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>

namespace prefixd::storage {

// IoBatch counts outstanding operations. It must outlive its operations: wait before destroying it,
// or submit with an owner (IoEngine::SubmitOwned).
class IoBatch {
 public:
  using Clock = std::chrono::steady_clock;

  IoBatch() = default;
  IoBatch(const IoBatch&) = delete;
  IoBatch& operator=(const IoBatch&) = delete;

  // Sets the deadline of everything submitted to this batch from now on. The default,
  // time_point::max(), means none.
  void SetDeadline(Clock::time_point deadline) { deadline_ = deadline; }
  Clock::time_point deadline() const { return deadline_; }

  // Waits until nothing is outstanding, however long that takes; the deadline plays no part.
  void Wait();
  // Returns false when an operation is still outstanding at `t`.
  bool WaitUntil(Clock::time_point t);

  // Engines call the methods below. A Submit adds all its operations before the first one
  // completes.
  void Add(size_t n);
  void Complete(size_t n);
  // Returns whether Complete(n) would wake a waiter.
  bool EndsWith(size_t n) const;
  // Keeps `owner` until nothing is outstanding; then the completing thread releases it. The owner
  // counts as outstanding itself: call Complete(1) once the operations are added.
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
