// Queues the operations of an I/O engine: one FIFO per priority, released within the caps.
// Not thread-safe: engines guard it with their own lock.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "storage/io/io_engine.h"

namespace prefixd::storage {

struct QueuedOp {
  IoOp* op = nullptr;
  IoBatch* batch = nullptr;
  uint64_t bytes = 0;
  uint32_t attempts = 0;
  int cancel_error = 0;  // an errno once it was cancelled in flight
};

// Completions collects finished operations and reports them to their batches when the engine's lock
// is free again, with one wake for all operations of a batch that finished together.
class Completions {
 public:
  // Does not throw: where there is no memory to collect it, the operation is reported at once.
  void Add(const QueuedOp& done, int64_t result) noexcept;
  void Tell();
  // Returns whether Tell wakes a waiter.
  bool Wakes() const;
  bool empty() const { return batches_.empty(); }

 private:
  std::vector<std::pair<IoBatch*, size_t>> batches_;
};

// ScrubManners says how scrub gives way. A disk busy with one of scrub's large reads delays all
// other reads, and a step reads little but often: while steps read, and until `quiet` after the
// last step read, the queue holds scrub back, but releases one operation at least every
// `longest_hold`, so that scrub never stands still.
struct ScrubManners {
  std::chrono::microseconds quiet{2000}, longest_hold{20000};
};

class IoQueue {
 public:
  explicit IoQueue(const IoLimits& limits, const ScrubManners& manners = {});

  void Push(const QueuedOp& queued);
  // Queues all operations; those that there is no memory for complete with -ENOMEM.
  void Push(std::span<IoOp> ops, IoBatch& batch, Completions& done);
  // Returns the next operation that fits; one larger than the byte cap goes alone. Operations whose
  // deadline has passed complete with -ETIMEDOUT instead.
  std::optional<QueuedOp> Pop(Completions& done);
  // Returns whether Pop has something to find: an operation that may go, or one held back for a
  // time, so that a thread must wait for that (HeldUntil).
  bool Ready() const;
  // Returns when the operation that the last Pop found held may go if nothing else happens; nullopt
  // if Pop found none held. The value is from the same moment as that Pop, so that no event falls
  // between the two.
  std::optional<IoBatch::Clock::time_point> HeldUntil() const { return held_until_; }
  // Ends an operation of Pop. False: it was interrupted and is queued again.
  bool Done(QueuedOp& queued, int64_t result, Completions& done);

  // Takes out the queued operations of `batch` (null: all) with -error.
  void Cancel(const IoBatch* batch, int error, Completions& done);

  uint32_t inflight_ops() const { return inflight_.ops; }

 private:
  using TimePoint = IoBatch::Clock::time_point;
  struct Load {
    uint32_t ops = 0;
    uint64_t bytes = 0;
  };
  struct Class {
    std::deque<QueuedOp> waiting;
    uint64_t passed_over = 0;  // bytes released before the operation in front
  };

  static bool Fits(const Load& load, const QueuedOp& next, const IoLimits& limits);
  bool MayGo(size_t priority) const;
  // Sets held_until to the time when a held scrub whose turn it is may go, else to nothing.
  std::optional<size_t> Next(std::optional<TimePoint>& held_until) const;
  // Returns when the queued scrub may go.
  TimePoint MayScrubAt() const;

  const ScrubManners manners_;
  const IoLimits limits_;
  const IoLimits background_limits_;
  std::array<Class, kIoPriorities> classes_;
  Load inflight_;
  Load background_;          // the part of inflight_ that is writes and scrub
  uint32_t step_reads_ = 0;  // in flight
  TimePoint step_ended_ = TimePoint::min();
  TimePoint scrub_waits_since_{};  // since it waits, or since the last scrub operation went
  std::optional<TimePoint> held_until_;
};

}  // namespace prefixd::storage
