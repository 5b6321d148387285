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
  // Between two samples it interpolates: the larger of two is no median.
  const auto at = [&](double p) {
    const double place = p * double(samples.size() - 1);
    const auto below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, samples.size() - 1);
    return samples[below] + (place - double(below)) * (samples[above] - samples[below]);
  };
  return {at(0.5), at(0.25), at(0.75)};
}

}  // namespace prefixd::bench
