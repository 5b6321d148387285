#include "attention/reference/diagnostics.h"

#include <algorithm>
#include <cmath>

namespace prefixd {

double NormalizedEntropy(std::span<const float> scores) {
  if (scores.size() < 2) return 0.0;
  const double max = *std::max_element(scores.begin(), scores.end());
  // With w = exp(s - max): -sum p log p = log Z - (1/Z) sum w (s - max).
  double z = 0, weighted = 0;
  for (float s : scores) {
    const double d = s - max;
    const double w = std::exp(d);
    z += w;
    if (w > 0) weighted += w * d;  // s = -inf has no mass
  }
  const double entropy = std::log(z) - weighted / z;
  return std::clamp(entropy / std::log(static_cast<double>(scores.size())), 0.0, 1.0);
}

double RelativeL1(std::span<const float> a, std::span<const float> b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += std::abs(static_cast<double>(a[i]) - b[i]);
    norm += std::abs(static_cast<double>(b[i]));
  }
  return difference / (norm + 1e-12);
}

}  // namespace prefixd
