// Encodes the rows of a segment on the disk; the header names the encoding. Code above storage/
// does not see it: reads return rows in the dtype of the put. docs/format.md has the bytes and the
// errors measured.
//
// kInt8: each row has, for key and value separately, one float32 scale and a signed byte for each
// element: x is about scale * byte, scale = max|x| / 127, rounded to nearest, ties to even. A whole
// key has one scale, though keys have channels that stand out: a large channel's step changes the
// others by little beside the row's norm, which is that channel's; `storage_bench --only encoding`
// compares it with scales for groups of elements on a real model's keys.
//
// Thread-safety: pure functions, except for RowEncoder: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/stored_part.h"

namespace prefixd::storage {

inline bool KnownEncoding(uint32_t value) { return value <= 1; }
struct StoredBytes {
  uint32_t key = 0, value = 0;
};
// Returns the stored bytes of one token of one KV head.
StoredBytes StoredRowBytes(const RowShape& row, RowEncoding encoding);

bool Plausible(const EncodingError& error);  // finite, none below zero
// Combines the errors of the rows of two segments, `n_a` and `n_b` rows.
EncodingError Combine(const EncodingError& a, uint64_t n_a, const EncodingError& b, uint64_t n_b);

// Decodes a key or a value of a kInt8 row (scale and elements) to elements of the given dtype.
// stored: sizeof(float) + dim bytes; out: dim elements. No alignment required.
void DecodeInt8(DType dtype, std::span<const std::byte> stored, std::byte* out);

// A RowEncoder encodes rows for kInt8 and accumulates the errors made.
class RowEncoder {
 public:
  // Encodes rows [n][row bytes] as given to [n][stored row bytes], valid until the next call. When
  // a row holds NaN or Inf, the first such row's index is returned instead, and no error is
  // accumulated.
  struct Encoded {
    std::span<const std::byte> rows;
    std::optional<size_t> not_finite;
  };
  Encoded Encode(const RowShape& row, std::span<const std::byte> rows);
  // Returns the error of all rows encoded so far.
  EncodingError error() const;

 private:
  struct Sum {
    double max = 0, squares = 0;
    void Add(double relative_square);
  };
  // Returns false for NaN or Inf.
  bool EncodePart(DType dtype, const std::byte* given, uint32_t dim, std::byte* out, Sum& sum);

  Sum key_, value_;
  uint64_t n_rows_ = 0;
  std::vector<std::byte> encoded_, decoded_;
  std::vector<float> given_, back_;
};

}  // namespace prefixd::storage
