// How the rows of a segment are encoded on the disk: the header says it, so that other encodings
// can be added without another format. A prefixd that does not know one refuses the segment.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>

#include "attention/kv_shape.h"

namespace prefixd::storage {

enum class RowEncoding : uint8_t {
  kAsGiven = 0,  // the geometry's dtype, bit for bit
};
inline bool KnownEncoding(uint32_t value) { return value == 0; }

struct StoredBytes {
  uint32_t key = 0, value = 0;
};
// Of one token of one KV head.
inline StoredBytes StoredRowBytes(const RowShape& row, RowEncoding) {
  return {static_cast<uint32_t>(row.key_bytes()), static_cast<uint32_t>(row.value_bytes())};
}

}  // namespace prefixd::storage
