// Encodes features that a prefix keeps beside its rows, so that a step need not recompute phi_k for
// the rows that it retrieves (docs/mathematics.md, "Recompute or read").
//
// Each token's features are kept relative to m of its chunk, where they are at most 1:
//   linear: exp(log phi - m) in equal steps: error at most half a step of the chunk's largest
//   log:    log phi - m in equal steps over a range: a relative error; below the range it is none
// The caches that steps subtract from should be built from the stored features (Decode, then
// PhiCache::AddFeatures with its logarithm): the subtraction is then exact whatever the rounding.
//
// Thread-safety: free functions over plain values.
// Thread-safety: free functions over plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/feature_format.h"

namespace prefixd {

// log_phi: [n][d_phi]; m: [d_phi], the chunk's, -inf where no token has the feature; features above
// m (by rounding) count as m. out: n * RowBytes(d_phi).
void EncodeFeatures(const FeatureFormat& format, std::span<const float> log_phi,
                    std::span<const float> m, std::span<std::byte> out);
// codes: n features -> weights exp(log phi - m), [n].
void DecodeFeatures(const FeatureFormat& format, const std::byte* codes, std::span<float> weights);

// Stored features of a step's retrieved rows. Borrowed.
struct StoredFeatures {
  FeatureFormat format;
  const std::byte* data = nullptr;  // row i at data + i * stride; null: recompute instead
  size_t stride = 0;
  std::span<const float> m;          // [n_chunks][d_phi]
  std::span<const uint32_t> chunks;  // [K] the chunk of each row; empty: all in the first
};

}  // namespace prefixd
