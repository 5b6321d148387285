#include "attention/top_ranks.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <functional>

namespace prefixd {
namespace {

constexpr size_t kSample = 2048, kSmall = 4 * kSample;

float Nth(std::vector<float>& x, size_t k) {
  std::nth_element(x.begin(), x.begin() + static_cast<ptrdiff_t>(k - 1), x.end(), std::greater<>());
  return x[k - 1];
}

}  // namespace

float KthLargest(std::span<const float> x, size_t k, std::vector<float>& scratch) {
  assert(k >= 1 && k <= x.size());
  const size_t n = x.size();
  if (n > kSmall && k < n / 4) {
    const size_t stride = n / kSample;
    scratch.clear();
    for (size_t i = 0; i < n; i += stride) scratch.push_back(x[i]);
    // Where the k-th should be in the sample, and four deviations of that count further down.
    const double expected = double(k) / double(n) * double(scratch.size());
    const auto at = static_cast<size_t>(expected + 4 * std::sqrt(expected + 1)) + 1;
    if (at < scratch.size()) {
      const float floor = Nth(scratch, at);
      scratch.clear();
      for (const float value : x) {
        if (value >= floor) scratch.push_back(value);
      }
      if (scratch.size() >= k) return Nth(scratch, k);
    }
  }
  scratch.assign(x.begin(), x.end());
  return Nth(scratch, k);
}

}  // namespace prefixd
