// Compares what two models or two ways through one give.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace prefixd::decoder::testing {

// Infinite where the numbers of values differ.
inline double MaxDifference(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size()) return std::numeric_limits<double>::infinity();
  double max = 0;
  for (size_t i = 0; i < a.size(); ++i) max = std::max(max, std::abs(double{a[i]} - b[i]));
  return max;
}

}  // namespace prefixd::decoder::testing
