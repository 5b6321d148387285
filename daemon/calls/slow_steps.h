// Logs calls of steps that took long: whose they were, and which stage took the time.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>

#include "daemon/process/log_throttle.h"
#include "prefixd/store.h"

namespace prefixd::daemon {

class SlowSteps {
 public:
  // 0: nothing is logged.
  explicit SlowSteps(std::chrono::milliseconds from) : from_(from) {}

  // Whether steps must be asked for their StepInfo.
  bool on() const { return from_.count() > 0; }
  // Logs the call if it took long. The stages are those of the step that they took longest, summed
  // over its KV heads, which several threads share.
  void Note(std::chrono::nanoseconds took, std::span<const StepRequest> steps,
            const std::string& request);

 private:
  const std::chrono::milliseconds from_;
  std::mutex mutex_;
  LogThrottle lines_;
};

}  // namespace prefixd::daemon
