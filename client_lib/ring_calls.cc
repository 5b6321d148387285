#include "client_lib/ring_calls.h"

#include <bit>
#include <utility>

namespace prefixd {

RingCalls::RingCalls(StepRing ring, uint32_t spin_us)
    : ring_(std::move(ring)), spin_us_(spin_us), free_((uint64_t{1} << ring_.shape().slots) - 1) {}

std::optional<uint32_t> RingCalls::Take() {
  uint64_t free = free_.load(std::memory_order_relaxed);
  while (free != 0) {
    if (free_.compare_exchange_weak(free, free & (free - 1), std::memory_order_acquire)) {
      return static_cast<uint32_t>(std::countr_zero(free));
    }
  }
  return std::nullopt;
}

void RingCalls::Free(uint32_t slot) {
  free_.fetch_or(uint64_t{1} << slot, std::memory_order_release);
}

bool RingCalls::Spin(uint32_t slot) const {
  if (spin_us_ == 0) return false;
  using Clock = std::chrono::steady_clock;
  const auto until = Clock::now() + std::chrono::microseconds(spin_us_);
  for (uint32_t round = 0; !ring_.answered(slot); ++round) {
    if (round % 16 == 15 && Clock::now() >= until) return false;
    PollPause(round);
  }
  return true;
}

}  // namespace prefixd
