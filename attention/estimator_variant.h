// The ways to estimate the remainder as users name them: an estimator, what it keeps of the mid
// region, and how it reads that (spec §3).
//
//   none
//   moment[/rR | /full][/cov][/parent | /rank]   R: rank of the cross moment C; full: all of C;
//                                                cov: the keys' full covariance; then the form
//   phi[/per_feature][/bf16]                     per_feature: the paper's clamp; bf16: half the
//                                                cache's size
//   centroid, cluster_moment[/parent], scan      by clusters of keys
//   auto                                         per head, as measured at ingest
//
// Thread-safety: plain values.
#pragma once

#include <compare>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention/kv_shape.h"
#include "attention/ledger.h"
#include "attention/phi_cache.h"
#include "attention/result.h"
#include "attention/tilt.h"

namespace prefixd {

struct EstimatorVariant {
  static constexpr uint32_t kFullRank = UINT32_MAX;

  EstimatorKind kind = EstimatorKind::kAuto;
  uint32_t rank = 0;                      // kMoment: of C; 0: none of it, kFullRank: all of it
  bool covariance = false;                // kMoment: the keys' full covariance
  MomentForm form = MomentForm::kDirect;  // kMoment, kClusterMoment
  PhiForm phi_form = PhiForm::kSigned;    // kPhi
  bool bf16 = false;                      // kPhi: u and T of the cache

  EstimatorVariant() = default;
  EstimatorVariant(EstimatorKind k) : kind(k) {}  // NOLINT: an estimator is its plainest variant
  auto operator<=>(const EstimatorVariant&) const = default;

  std::string Name() const;
  static Result<EstimatorVariant> Parse(std::string_view name);
  // How it reads left out: variants that keep the same.
  EstimatorVariant Kept() const;
  bool clustered() const {
    return kind == EstimatorKind::kCentroid || kind == EstimatorKind::kClusterMoment ||
           kind == EstimatorKind::kScan;
  }
};

// "moment, scan" -> both; kInvalidArgument names the one that is wrong. "auto" is not an element.
Result<std::vector<EstimatorVariant>> ParseVariants(std::string_view list);
std::string VariantNames(std::span<const EstimatorVariant> variants);  // what ParseVariants reads

// What the variant keeps costs beside rows of this shape, in token-equivalents: the bytes that are
// stored, over those of a row. d_phi: of the maps, 0 without; clusters: how many there are.
double VariantTokens(const EstimatorVariant& variant, const RowShape& row, uint32_t d_phi,
                     uint32_t clusters);

}  // namespace prefixd
