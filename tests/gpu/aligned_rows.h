// Random rows at strides that keep elements aligned, as kernels want them.
#pragma once

#include "tests/support/random_kv.h"

namespace prefixd::gpu::testing {

inline prefixd::testing::OwnedRows AlignedRows(prefixd::testing::Random& random, RowShape shape,
                                               size_t count) {
  const uint32_t gaps[] = {0, 0, 4, 16, 12};
  prefixd::testing::OwnedRows rows(shape, count, gaps[random.Int(0, 4)]);
  for (size_t i = 0; i < count; ++i) {
    rows.Set(i, random.Normals(shape.key_dim), random.Normals(shape.value_dim));
  }
  return rows;
}

}  // namespace prefixd::gpu::testing
