// Presents rows to the kernels as vector blocks. Internal to attention/.
#pragma once

#include <cstddef>

#include "attention/kernels/kernels.h"
#include "attention/rows/rows.h"

namespace prefixd {

// Returns keys or values of rows [begin, begin + n), without prefetching.
inline VectorBlock KeyBlock(const RowsView& rows, size_t begin, size_t n) {
  VectorBlock block;
  block.n = n;
  block.dim = rows.shape.key_dim;
  block.dtype = rows.shape.dtype;
  block.stride = rows.stride;
  if (rows.refs != nullptr) {
    block.refs = rows.refs + begin;
  } else if (n > 0) {
    block.data = rows.key(begin);
  }
  return block;
}
inline VectorBlock ValueBlock(const RowsView& rows, size_t begin, size_t n) {
  VectorBlock block = KeyBlock(rows, begin, n);
  block.dim = rows.shape.value_dim;
  block.of_values = true;
  if (block.data != nullptr) block.data += rows.shape.key_bytes();
  return block;
}

// Likewise, but kernels prefetch whole rows up to the last of `rows`: for a pass over keys that a
// pass over the values follows. The second pass does not prefetch the values of rows in order
// again.
inline VectorBlock KeyBlockAhead(const RowsView& rows, size_t begin, size_t n) {
  VectorBlock block = KeyBlock(rows, begin, n);
  block.ahead = rows.count - begin;
  block.ahead_key_bytes = rows.shape.key_bytes();
  block.ahead_value_bytes = rows.shape.value_bytes();
  return block;
}
inline VectorBlock ValueBlockAhead(const RowsView& rows, size_t begin, size_t n) {
  VectorBlock block = ValueBlock(rows, begin, n);
  block.ahead = rows.count - begin;
  block.ahead_value_bytes = rows.shape.value_bytes();
  return block;
}

}  // namespace prefixd
