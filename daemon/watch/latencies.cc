#include "daemon/watch/latencies.h"

#include <numeric>

namespace prefixd::daemon {

uint64_t LatencyCounts::count() const {
  return std::accumulate(calls.begin(), calls.end(), uint64_t{0});
}

double LatencyCounts::QuantileSeconds(double share) const {
  const uint64_t all = count();
  if (all == 0) return 0;
  const double wanted = std::clamp(share, 0.0, 1.0) * double(all);
  double below = 0;
  for (size_t bucket = 0; bucket < kBuckets; ++bucket) {
    const auto here = double(calls[bucket]);
    if (here == 0 || below + here < wanted) {
      below += here;
      continue;
    }
    const auto begin = bucket == 0 ? 0.0 : double(EndOf(bucket - 1));
    return (begin + (double(EndOf(bucket)) - begin) * (wanted - below) / here) * 1e-6;
  }
  return double(EndOf(kBuckets - 1)) * 1e-6;
}

LatencyCounts LatencyCounts::operator-(const LatencyCounts& earlier) const {
  LatencyCounts difference;
  for (size_t i = 0; i < kBuckets; ++i) difference.calls[i] = calls[i] - earlier.calls[i];
  difference.total_ns = total_ns - earlier.total_ns;
  return difference;
}

LatencyCounts Latencies::counts() const {
  LatencyCounts counts;
  for (size_t i = 0; i < LatencyCounts::kBuckets; ++i) {
    counts.calls[i] = calls_[i].load(std::memory_order_relaxed);
  }
  counts.total_ns = total_ns_.load(std::memory_order_relaxed);
  return counts;
}

}  // namespace prefixd::daemon
