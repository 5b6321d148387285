// The client's side of a connection's ring: slots for calls of steps, and waiting for their
// answers. Internal to client_lib.
//
// Thread-safety: all methods may be called concurrently; a slot belongs to whoever took it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>

#include "protocol/step_ring.h"

namespace prefixd {

class RingCalls {
 public:
  RingCalls(StepRing ring, uint32_t spin_us);

  uint32_t spin_us() const { return spin_us_; }
  uint64_t slot_bytes() const { return ring_.shape().slot_bytes; }
  std::span<std::byte> slot(uint32_t i) const { return ring_.slot(i); }

  // Takes a slot; nullopt when none is free.
  std::optional<uint32_t> Take();
  void Free(uint32_t slot);
  void Cancel(uint32_t slot) const { ring_.Cancel(slot); }
  // Hands the slot over and waits for its answer; false when `give_up` says so, which is asked now
  // and then. The slot must not be used again then.
  template <typename GiveUp>
  bool Await(uint32_t slot, const GiveUp& give_up) const {
    ring_.Ask(slot);
    if (Spin(slot)) return true;
    auto pause = kFirstPause;
    while (!ring_.answered(slot)) {
      ring_.Sleep(slot, pause);
      if (ring_.answered(slot)) break;
      // An answer may come before the end of the connection.
      if (give_up()) return ring_.answered(slot);
      if (pause < kLongestPause) pause *= 2;
    }
    return true;
  }

 private:
  static constexpr std::chrono::milliseconds kFirstPause{5}, kLongestPause{40};
  bool Spin(uint32_t slot) const;

  const StepRing ring_;
  const uint32_t spin_us_;
  std::atomic<uint64_t> free_;  // a bit for each slot
};

}  // namespace prefixd
