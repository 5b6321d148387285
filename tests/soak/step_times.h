// Counts how long steps took, by tenant, in memory that all processes share: logarithmic bins, so
// that half an hour of steps takes no more than a second of them.
//
// Thread-safety: any number of processes may add while one reads.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>

namespace prefixd::soak {

inline constexpr size_t kMaxTenants = 64;
inline constexpr size_t kBinsPerOctave = 8;           // 9% apart
inline constexpr size_t kBins = 27 * kBinsPerOctave;  // 1 us to 134 s

using StepBins = std::array<uint64_t, kBins>;

class StepTimes {
 public:
  void Add(size_t tenant, double us) {
    const double bin = kBinsPerOctave * std::log2(std::max(us, 1.0));
    ++counts_[tenant % kMaxTenants][std::min(static_cast<size_t>(bin), kBins - 1)];
  }
  StepBins Of(size_t tenant) const {
    StepBins bins;
    for (size_t b = 0; b < kBins; ++b) bins[b] = counts_[tenant % kMaxTenants][b];
    return bins;
  }

 private:
  std::array<std::array<std::atomic<uint64_t>, kBins>, kMaxTenants> counts_{};
};

inline uint64_t Count(const StepBins& bins) {
  return std::accumulate(bins.begin(), bins.end(), uint64_t{0});
}
inline StepBins Since(StepBins now, const StepBins& then) {
  for (size_t b = 0; b < kBins; ++b) now[b] -= then[b];
  return now;
}
// The middle of the bin, in microseconds; 0 without steps.
inline double Percentile(const StepBins& bins, double share) {
  const uint64_t n = Count(bins);
  if (n == 0) return 0;
  const auto rank = static_cast<uint64_t>(share * double(n - 1));
  uint64_t seen = 0;
  for (size_t b = 0; b < kBins; ++b) {
    seen += bins[b];
    if (seen > rank) return std::exp2((double(b) + 0.5) / kBinsPerOctave);
  }
  return 0;
}

}  // namespace prefixd::soak
