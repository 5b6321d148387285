// Implements the summary of the tilted-moment estimator (docs/mathematics.md, "The tilted-moment
// estimator"): training-free, additive.
//
// A MomentSummary holds the count, mean key, centred second moments of the keys (diagonal or full),
// mean value and, optionally, the centred cross moment C = E[(k - mu_k)(v - vbar)^T] of a token
// set, whole or as a factor of low rank. It accumulates in float64, merges by Chan's formula, and
// is stored in float32. It only ever adds: a step takes tokens away one-way, never from the
// summary.
//
// C is gathered whole; Factored() makes the small form that steps read. Merging a factored summary
// expands it again, so checkpoints keep C whole and factoring comes last.
//
// Thread-safety: plain values; const methods may be called from any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/rows/rows.h"
#include "prefixd/result.h"

namespace prefixd {

class MomentSummary {
 public:
  MomentSummary() = default;  // an empty set without a shape
  MomentSummary(uint32_t key_dim, uint32_t value_dim, bool with_cross,
                bool with_covariance = false);

  void Add(const RowsView& rows);
  // Adds the moments of a disjoint token set of equal shape; `other` may be empty.
  void Merge(const MomentSummary& other);

  uint64_t count() const { return count_; }
  uint32_t key_dim() const { return key_dim_; }
  uint32_t value_dim() const { return value_dim_; }
  bool has_cross() const { return !cross_.empty(); }            // C as a whole
  bool has_covariance() const { return !covariance_.empty(); }  // the keys' full covariance
  uint32_t cross_rank() const { return cross_rank_; }           // rank of the factored C; 0: none

  std::span<const double> mean_key() const { return mean_key_; }      // [key_dim]
  std::span<const double> key_m2() const { return key_m2_; }          // [key_dim], sum, centred
  std::span<const double> mean_value() const { return mean_value_; }  // [value_dim]
  std::span<const double> cross() const { return cross_; }  // [key_dim][value_dim], sum, centred

  std::span<const double> covariance() const { return covariance_; }  // [key_dim]^2, sum, centred
  // C ~ key_factor value_factor, as sums: [key_dim][rank], [rank][value_dim].
  std::span<const double> key_factor() const { return key_factor_; }
  std::span<const double> value_factor() const { return value_factor_; }

  // Returns the same moments with C replaced by its best approximation of rank `rank`, in the norm
  // that weighs key channel j by query_rms[j] (empty: all alike). REQUIRES has_cross();
  // 1 <= rank < min(key_dim, value_dim).
  MomentSummary Factored(uint32_t rank, std::span<const float> query_rms) const;

  // Returns the same moments with C factored along given directions [rank][value_dim], orthonormal:
  // those that Factored() found for much the same token set.
  MomentSummary FactoredAlong(std::span<const double> directions) const;
  // Returns the same moments without C, without the full covariance, or without either.
  MomentSummary Reduced(bool keep_cross, bool keep_covariance) const;

  size_t bytes() const;  // serialised payload, which budgets charge

  // Returns self-describing little-endian bytes with a version; float32 payload. The caller adds
  // checksums (storage verifies what it reads); Deserialize still refuses malformed input.
  std::vector<std::byte> Serialize() const;
  static Result<MomentSummary> Deserialize(std::span<const std::byte> bytes);

 private:
  uint32_t key_dim_ = 0, value_dim_ = 0;
  uint64_t count_ = 0;
  uint32_t cross_rank_ = 0;
  std::vector<double> mean_key_, key_m2_, mean_value_, cross_;
  std::vector<double> covariance_, key_factor_, value_factor_;

  void Expand();  // turns the factored C into a whole one
};

}  // namespace prefixd
