// Tracks how far a background job has come, and whether it must stop.
//
// Thread-safety: all members may be used concurrently.
#pragma once

#include <atomic>
#include <cstdint>

#include "prefixd/result.h"
#include "runtime/work/background_pace.h"

namespace prefixd {

struct WorkProgress {
  std::atomic<uint64_t> done{0}, total{0};
  std::atomic<bool> cancelled{false};
  BackgroundPace* pace = nullptr;  // set before the job begins
  // Call between two pieces of the job, which may make them wait; kCancelled when it must stop.
  Status Check() const {
    if (pace) pace->Rest();
    if (!cancelled.load(std::memory_order_relaxed)) return {};
    return Error{Code::kCancelled, "background work was stopped"};
  }
};

}  // namespace prefixd
