// Says when work that reports its progress has stood still for too long.
//
// Not thread-safe.
#pragma once

#include <chrono>
#include <cstdint>

namespace prefixd {

class Standstill {
 public:
  using Clock = std::chrono::steady_clock;

  explicit Standstill(Clock::duration limit, Clock::time_point now = Clock::now())
      : limit_(limit), advanced_(now) {}

  // Notes how far the work is, and returns whether it has come no further for longer than the
  // limit. Work that begins again has to pass what it had done before, or it might begin for ever.
  bool Note(uint64_t done, Clock::time_point now = Clock::now()) {
    if (done > most_) {
      most_ = done;
      advanced_ = now;
    }
    return now - advanced_ > limit_;
  }

 private:
  const Clock::duration limit_;
  uint64_t most_ = 0;
  Clock::time_point advanced_;
};

}  // namespace prefixd
