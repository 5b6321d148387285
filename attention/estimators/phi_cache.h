// Keeps the max-shifted phi cache of one (layer, KV head) over a token set (docs/mathematics.md,
// eqs. [34-43]).
//
//   m[f] = max_i log phi_k(k_i)[f]
//   u[f] = sum_i exp(log phi_k(k_i)[f] - m[f])
//   T[f] = sum_i exp(log phi_k(k_i)[f] - m[f]) v_i
//
// The maps may be asymmetric (one for queries, one for keys) or the same: the cache holds keys
// only, and does not depend on it. Caches of disjoint sets merge; the empty set has m = -inf,
// u = 0, T = 0. A cache is float32 in memory; it is stored in float32 or, at half the charge, with
// u and T in bf16.
//
// A key whose features outweigh those of all others (attention/estimators/outweighing.h) does not
// enter these sums: its row is kept apart, and a step counts it exactly. Adding further rows takes
// it back into the sums once it outweighs them no more.
//
// Thread-safety: plain value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/estimators/feature_map.h"
#include "attention/rows/rows.h"
#include "prefixd/estimator_variant.h"
#include "prefixd/result.h"

namespace prefixd {

// PhiForm::kPerFeature leaves at least this much of a feature (docs/mathematics.md).
inline constexpr double kFeatureEpsilon = 1e-12;

// A row that a cache keeps apart.
struct ApartRow {
  std::vector<float> key, value;  // [key_dim], [value_dim]
  std::vector<float> log_phi;     // [d_phi]
  bool operator==(const ApartRow&) const = default;
};

class PhiCache {
 public:
  PhiCache() = default;
  PhiCache(uint32_t d_phi, uint32_t value_dim);

  // Adds rows whose features are computed with `phi_k` (its in_dim = key_dim).
  void Add(const RowsView& rows, const FeatureMap& phi_k);
  // log_phi: [rows.count][d_phi], as FeatureMap::LogPhi returns it. outweighing: those of the rows,
  // ascending, that are kept apart if they outweigh the others also in the whole cache.
  void AddFeatures(const RowsView& rows, std::span<const float> log_phi,
                   std::span<const uint32_t> outweighing = {});
  // Both are of rows with the same dimensions.
  void Merge(const PhiCache& other);

  uint64_t count() const { return count_; }  // tokens, also those kept apart
  uint32_t d_phi() const { return d_phi_; }
  uint32_t value_dim() const { return value_dim_; }
  std::span<const float> m() const { return m_; }             // [d_phi]
  std::span<const float> u() const { return u_; }             // [d_phi]
  std::span<const float> t() const { return t_; }             // [d_phi][value_dim]
  std::span<const ApartRow> apart() const { return apart_; }  // at most kMostApart

  size_t bytes() const;        // serialised payload, which budgets charge
  size_t apart_bytes() const;  // of these, those of the rows kept apart
  DType dtype() const { return dtype_; }
  // Returns the cache with u and T rounded to bf16, and stored so from now on. m stays float32: its
  // error would be one in the exponent. Rounding comes last: merging gives a float32 cache again.
  PhiCache RoundedToBf16() const;

  std::vector<std::byte> Serialize() const;
  static Result<PhiCache> Deserialize(std::span<const std::byte> bytes);

 private:
  void AddSums(const PhiCache& other);
  void Settle();

  uint32_t d_phi_ = 0, value_dim_ = 0;
  uint64_t count_ = 0;
  DType dtype_ = DType::kF32;  // stored type of u and T
  std::vector<float> m_, u_, t_;
  std::vector<ApartRow> apart_;
};

}  // namespace prefixd
