// Lays queries out for the kernels. Internal to attention/.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/kernels/kernels.h"

namespace prefixd {

// queries: [n][key_dim] -> [n][PadUp(key_dim)], each padded with zeros.
template <typename T>
std::vector<T> PadQueries(std::span<const float> queries, size_t n, uint32_t key_dim) {
  const size_t ldq = PadUp(key_dim);
  std::vector<T> padded(n * ldq);
  for (size_t i = 0; i < n; ++i) {
    std::copy_n(queries.data() + i * key_dim, key_dim, padded.data() + i * ldq);
  }
  return padded;
}

}  // namespace prefixd
