// The tilted-moment estimator (spec §3, "The tilted-moment estimator"): training-free, additive.
//
// A MomentSummary holds the count, mean key, centred second moments of the keys (diagonal), mean
// value and, optionally, the centred cross moment C = E[(k - mu_k)(v - vbar)^T] of a token set.
// Accumulated in float64, merged by Chan's formula, stored in float32. Only ever add: tokens are
// taken away one-way, at a step, never from the summary.
//
// Thread-safety: plain values; const methods may be called from any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/kv_shape.h"
#include "attention/result.h"

namespace prefixd {

class MomentSummary {
 public:
  MomentSummary() = default;  // the empty set, of no shape
  MomentSummary(uint32_t key_dim, uint32_t value_dim, bool with_cross);

  void Add(const RowsView& rows);
  // Disjoint token sets of equal shape; `other` may be empty.
  void Merge(const MomentSummary& other);

  uint64_t count() const { return count_; }
  uint32_t key_dim() const { return key_dim_; }
  uint32_t value_dim() const { return value_dim_; }
  bool has_cross() const { return !cross_.empty(); }

  std::span<const double> mean_key() const { return mean_key_; }      // [key_dim]
  std::span<const double> key_m2() const { return key_m2_; }          // [key_dim], sum, centred
  std::span<const double> mean_value() const { return mean_value_; }  // [value_dim]
  std::span<const double> cross() const { return cross_; }  // [key_dim][value_dim], sum, centred

  // Self-describing little-endian bytes with a version; float32 payload. Checksums are the
  // caller's (storage verifies what it reads); Deserialize still refuses malformed input.
  std::vector<std::byte> Serialize() const;
  static Result<MomentSummary> Deserialize(std::span<const std::byte> bytes);

 private:
  uint32_t key_dim_ = 0, value_dim_ = 0;
  uint64_t count_ = 0;
  std::vector<double> mean_key_, key_m2_, mean_value_, cross_;
};

}  // namespace prefixd
