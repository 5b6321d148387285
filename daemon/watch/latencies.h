// Counts how long calls took, in buckets. Adding costs two relaxed atomics and no memory, so that
// steps are counted, too.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace prefixd::daemon {

// How many calls took how long: a quarter of an octave of microseconds is a bucket; the last one
// holds what is longer, too. A plain value.
struct LatencyCounts {
  static constexpr size_t kParts = 4, kBuckets = 26 * kParts;

  std::array<uint64_t, kBuckets> calls{};
  uint64_t total_ns = 0;

  static constexpr size_t BucketOf(uint64_t us) {
    if (us < kParts) return us;
    const auto octave = static_cast<size_t>(std::bit_width(us)) - 1;
    return std::min((octave - 1) * kParts + ((us >> (octave - 2)) & (kParts - 1)), kBuckets - 1);
  }
  // The microseconds at which the next bucket begins.
  static constexpr uint64_t EndOf(size_t bucket) {
    if (bucket < kParts) return bucket + 1;
    return (kParts + bucket % kParts + 1) << (bucket / kParts - 1);
  }

  uint64_t count() const;
  // The time that a share of the calls, within [0, 1], did not exceed, interpolated within its
  // bucket. 0: there were no calls.
  double QuantileSeconds(double share) const;
  LatencyCounts operator-(const LatencyCounts& earlier) const;
};

class Latencies {
 public:
  void Add(std::chrono::nanoseconds time) {
    const auto ns = static_cast<uint64_t>(std::max<int64_t>(time.count(), 0));
    calls_[LatencyCounts::BucketOf(ns / 1000)].fetch_add(1, std::memory_order_relaxed);
    total_ns_.fetch_add(ns, std::memory_order_relaxed);
  }
  LatencyCounts counts() const;

 private:
  std::array<std::atomic<uint64_t>, LatencyCounts::kBuckets> calls_{};
  std::atomic<uint64_t> total_ns_{0};
};

}  // namespace prefixd::daemon
