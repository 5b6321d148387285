// What waits for its turn in an I/O engine: one FIFO per priority, released within the caps.
// Not thread-safe: engines guard it with their own lock.
#pragma once

#include <array>
#include <deque>
#include <optional>

#include "storage/io_engine.h"

namespace prefixd::storage {

struct QueuedOp {
  IoOp* op = nullptr;
  IoBatch* batch = nullptr;
  uint64_t bytes = 0;
  uint32_t attempts = 0;
};

class IoQueue {
 public:
  explicit IoQueue(const IoLimits& limits) : limits_(limits) {}

  void Push(const QueuedOp& queued) {
    waiting_[static_cast<size_t>(queued.op->priority)].push_back(queued);
  }

  // The next operation that fits; one larger than the byte cap goes alone.
  std::optional<QueuedOp> Pop() {
    for (auto& fifo : waiting_) {
      if (fifo.empty()) continue;
      const QueuedOp next = fifo.front();
      const bool fits = inflight_ops_ < limits_.max_inflight_ops &&
                        inflight_bytes_ + next.bytes <= limits_.max_inflight_bytes;
      if (!fits && inflight_ops_ > 0) return std::nullopt;
      fifo.pop_front();
      ++inflight_ops_;
      inflight_bytes_ += next.bytes;
      return next;
    }
    return std::nullopt;
  }

  void Done(const QueuedOp& queued) {
    --inflight_ops_;
    inflight_bytes_ -= queued.bytes;
  }

  uint32_t inflight_ops() const { return inflight_ops_; }

 private:
  const IoLimits limits_;
  std::array<std::deque<QueuedOp>, kIoPriorities> waiting_;
  uint32_t inflight_ops_ = 0;
  uint64_t inflight_bytes_ = 0;
};

// Interrupted operations are started again, but not forever.
inline bool ShouldRetry(int64_t result, uint32_t attempts) {
  return (result == -EINTR || result == -EAGAIN) && attempts < 16;
}

}  // namespace prefixd::storage
