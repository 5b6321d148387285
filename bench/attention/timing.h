// Computes times and ratios of the attention bench.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "measure/timing/statistics.h"

namespace prefixd::bench {

inline double Seconds(const std::function<void()>& run) {
  const auto begun = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

inline double Median(const std::vector<double>& samples) { return Summarise(samples).median; }

// Returns each round's ratio.
inline std::vector<double> Ratios(const std::vector<double>& a, const std::vector<double>& b) {
  std::vector<double> ratios;
  for (size_t i = 0; i < a.size(); ++i) ratios.push_back(a[i] / b[i]);
  return ratios;
}

}  // namespace prefixd::bench
