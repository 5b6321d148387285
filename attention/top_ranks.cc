#include "attention/top_ranks.h"

#include <bit>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <limits>

#include "attention/code_scan.h"

namespace prefixd {
namespace {

constexpr size_t kSample = 2048, kSmall = 16 * kSample;

// Floats as whole numbers of the same order, and back.
int32_t Ordered(float x) {
  const auto bits = std::bit_cast<int32_t>(x);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
float FromOrdered(int32_t order) {
  return std::bit_cast<float>(order < 0 ? order ^ 0x7fffffff : order);
}

// The largest number that at least k of x reach. Bisected: counting is far faster than sorting.
float Nth(std::span<const float> x, size_t k) {
  // At least k reach `low`; fewer, or none at all, reach `high`.
  int64_t low = Ordered(-std::numeric_limits<float>::infinity());
  int64_t high = int64_t{Ordered(CodeScan().largest_float(x.data(), x.size()))} + 1;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const float at = FromOrdered(static_cast<int32_t>(middle));
    if (CodeScan().count_from(x.data(), x.size(), at) >= k) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return FromOrdered(static_cast<int32_t>(low));
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
  return Nth(x, k);
}

}  // namespace prefixd
