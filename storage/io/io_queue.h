// What waits for its turn in an I/O engine: one FIFO per priority, released within the caps.
// Not thread-safe: engines guard it with their own lock.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
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

// Finished operations, told to their batches when the engine's lock is free again: one wake for all
// of a batch that finished together.
class Completions {
 public:
  void Add(const QueuedOp& done, int64_t result);
  void Tell();
  // Whether telling wakes somebody.
  bool Wakes() const;
  bool empty() const { return batches_.empty(); }

 private:
  std::vector<std::pair<IoBatch*, size_t>> batches_;
};

// How scrub gives way. A disk that has one of its large reads answers nobody else meanwhile, and a
// step reads little but often: while steps read, and until `quiet` after the last of it, scrub is
// held, but an operation goes at least every `longest_hold`, so that it never stands still.
struct ScrubManners {
  std::chrono::microseconds quiet{2000}, longest_hold{20000};
};

class IoQueue {
 public:
  explicit IoQueue(const IoLimits& limits, const ScrubManners& manners = {});

  void Push(const QueuedOp& queued);
  // The next operation that fits; one larger than the byte cap goes alone. Those whose deadline has
  // passed complete with -ETIMEDOUT instead.
  std::optional<QueuedOp> Pop(Completions& done);
  // Whether Pop has something to find: an operation that may go, or one that is held for a time, so
  // that somebody must wait for that (HeldUntil).
  bool Ready() const;
  // What the last Pop, if it found nothing, says it found held: when that may go if nothing else
  // happens. Of the same moment as that Pop, so that nothing falls between the two.
  std::optional<IoBatch::Clock::time_point> HeldUntil() const { return held_until_; }
  // Ends what Pop returned. False: it was interrupted and waits in the queue again.
  bool Done(QueuedOp& queued, int64_t result, Completions& done);

  // Takes out what waits for `batch` (null: everything) with -error.
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
  // held_until: set to when scrub may go where it would be its turn and it is held, else to
  // nothing.
  std::optional<size_t> Next(std::optional<TimePoint>& held_until) const;
  // Of the scrub that waits.
  TimePoint MayScrubAt() const;

  const ScrubManners manners_;
  const IoLimits limits_;
  const IoLimits background_limits_;
  std::array<Class, kIoPriorities> classes_;
  Load inflight_;
  Load background_;          // the part of inflight_ that is writes and scrub
  uint32_t step_reads_ = 0;  // in flight
  TimePoint step_ended_ = TimePoint::min();
  TimePoint scrub_waits_since_{};  // since it waits, or since the last of it went
  std::optional<TimePoint> held_until_;
};

}  // namespace prefixd::storage
