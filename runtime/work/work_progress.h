// Tracks how far a background job has come, and whether it must stop.
//
// Thread-safety: all members may be used concurrently.
#pragma once

#include <atomic>
#include <cstdint>

#include "prefixd/result.h"

namespace prefixd {

struct WorkProgress {
  std::atomic<uint64_t> done{0}, total{0};
  std::atomic<bool> cancelled{false};
  // kCancelled when the job must stop.
  Status Check() const {
    if (!cancelled.load(std::memory_order_relaxed)) return {};
    return Error{Code::kCancelled, "background work was stopped"};
  }
};

}  // namespace prefixd
