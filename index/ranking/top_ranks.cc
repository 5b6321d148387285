#include "index/ranking/top_ranks.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cstdint>
#include <limits>

#include "index/codes/code_scan.h"

namespace prefixd {
namespace {

// Floats as whole numbers of the same order, and back.
int32_t Ordered(float x) {
  const auto bits = std::bit_cast<int32_t>(x);
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
float FromOrdered(int32_t order) {
  return std::bit_cast<float>(order < 0 ? order ^ 0x7fffffff : order);
}

// Passes over so few numbers cost next to nothing.
constexpr size_t kFew = 256;

}  // namespace

float KthLargest(std::span<const float> x, size_t k, std::vector<float>& scratch) {
  assert(k >= 1 && k <= x.size());
  const CodeScanTable& kernels = CodeScan();
  // At least k reach `low` (n_low of them), fewer than k reach `high` (n_high).
  const int64_t least = Ordered(-std::numeric_limits<float>::infinity());
  int64_t high = int64_t{Ordered(kernels.largest_float(x.data(), x.size()))} + 1, low = high;
  size_t n_low = 0, n_high = 0;
  // Down from the largest in steps that double, from an eighth of its size on: numbers that are
  // looked for among so many are mostly of about one size.
  for (int64_t step = int64_t{1} << 20; n_low < k; step *= 2) {
    high = low;
    n_high = n_low;
    low = std::max(least, high - step);
    n_low = low == least
                ? x.size()
                : kernels.count_from(x.data(), x.size(), FromOrdered(static_cast<int32_t>(low)));
  }
  // Bisected: counting is far faster than sorting. Once most are out of question the others are
  // taken along alone.
  while (high - low > 1) {
    if (x.size() > kFew && n_low - n_high < x.size() / 4) {
      const float from = FromOrdered(static_cast<int32_t>(low));
      // Nothing to leave out above; and -0, below +0 in order, would be left out as equal to it.
      const float to = n_high == 0 ? std::numeric_limits<float>::quiet_NaN()
                                   : FromOrdered(static_cast<int32_t>(high));
      if (scratch.size() < x.size()) scratch.resize(x.size());
      const size_t n = kernels.between(x.data(), x.size(), from, to, scratch.data());
      x = std::span<const float>(scratch).first(n);
      k -= n_high;
      n_low = n;
      n_high = 0;
    }
    const int64_t middle = low + (high - low) / 2;
    const size_t n =
        kernels.count_from(x.data(), x.size(), FromOrdered(static_cast<int32_t>(middle)));
    if (n >= k) {
      low = middle;
      n_low = n;
    } else {
      high = middle;
      n_high = n;
    }
  }
  return FromOrdered(static_cast<int32_t>(low));
}

}  // namespace prefixd
