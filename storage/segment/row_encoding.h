// How the rows of a segment are encoded on the disk; the header says it. Above storage/ nobody
// notices: reads give rows back in the dtype they were put in. docs/format.md has the bytes and the
// errors measured.
//
// kInt8: per row, and in it apart for key and value, one float32 scale and a signed byte for each
// element: x is about scale * byte, scale = max|x| / 127, rounded to nearest, ties to even. One
// scale for a whole key, though keys have channels that stand out: what a large channel's step does
// to the others is small beside the row's norm, which is that channel's; `storage_bench --only
// encoding` sets it beside scales for groups of elements on a real model's keys.
//
// Thread-safety: pure functions, but RowEncoder: one thread at a time.
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
// Of one token of one KV head.
StoredBytes StoredRowBytes(const RowShape& row, RowEncoding encoding);

bool Plausible(const EncodingError& error);  // finite, none below zero
// Of the rows of two segments together, `n_a` and `n_b` of them.
EncodingError Combine(const EncodingError& a, uint64_t n_a, const EncodingError& b, uint64_t n_b);

// A key or a value of a kInt8 row (scale and elements) as the given dtype's elements.
//   stored: sizeof(float) + dim bytes; out: dim elements. No alignment required.
void DecodeInt8(DType dtype, std::span<const std::byte> stored, std::byte* out);

// Encodes rows for kInt8 and sums up the errors made.
class RowEncoder {
 public:
  explicit RowEncoder(const RowShape& row) : row_(row) {}

  // rows: [n][row bytes] as given -> [n][stored row bytes], valid until the next call. The index of
  // the first row that holds NaN or Inf comes back instead, and nothing is summed up.
  struct Encoded {
    std::span<const std::byte> rows;
    std::optional<size_t> not_finite;
  };
  Encoded Encode(std::span<const std::byte> rows);
  // Of everything encoded so far.
  EncodingError error() const;

 private:
  struct Sum {
    double max = 0, squares = 0;
    void Add(double relative_square);
  };
  // False: NaN or Inf.
  bool EncodePart(const std::byte* given, uint32_t dim, std::byte* out, Sum& sum);

  const RowShape row_;
  Sum key_, value_;
  uint64_t n_rows_ = 0;
  std::vector<std::byte> encoded_, decoded_;
  std::vector<float> given_, back_;
};

}  // namespace prefixd::storage
