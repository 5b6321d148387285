// Computes the median and spread of repeated measurements.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace prefixd::bench {

struct Spread {
  double median = 0, low = 0, high = 0;  // 25th and 75th percentile
};

inline Spread Summarise(std::vector<double> samples) {
  if (samples.empty()) return {};
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double p) {
    return samples[static_cast<size_t>(std::lround(p * double(samples.size() - 1)))];
  };
  return {at(0.5), at(0.25), at(0.75)};
}

}  // namespace prefixd::bench
