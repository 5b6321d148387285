#include "prefixd/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace prefixd {
namespace {

constexpr float kEmpty = -std::numeric_limits<float>::infinity();

}  // namespace

void MergeStates(std::span<float> y_a, float* lse_a, std::span<const float> y_b, float lse_b) {
  if (lse_b == kEmpty) return;
  if (*lse_a == kEmpty) {
    std::copy_n(y_b.begin(), y_a.size(), y_a.begin());
    *lse_a = lse_b;
    return;
  }
  const double max = std::max(*lse_a, lse_b);
  const double a = std::exp(*lse_a - max);
  const double b = std::exp(lse_b - max);
  for (size_t l = 0; l < y_a.size(); ++l) {
    y_a[l] = static_cast<float>((a * y_a[l] + b * y_b[l]) / (a + b));
  }
  *lse_a = static_cast<float>(max + std::log(a + b));
}

}  // namespace prefixd
