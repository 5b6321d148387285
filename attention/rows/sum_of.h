// Sums in float64, in a form that compilers may split into several sums.
#pragma once

#include <cstddef>

namespace prefixd {

// Returns sum_j term(j), in float64 and in several sums: a single one is a chain of dependent
// additions.
template <typename Term>
double SumOf(size_t n, const Term& term) {
  constexpr size_t kSums = 8;
  double sums[kSums] = {};
  size_t j = 0;
  for (; j + kSums <= n; j += kSums) {
    for (size_t l = 0; l < kSums; ++l) sums[l] += term(j + l);
  }
  for (; j < n; ++j) sums[0] += term(j);
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace prefixd
