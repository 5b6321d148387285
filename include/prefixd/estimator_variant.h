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

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/result.h"

namespace prefixd {

// The estimators of the remainder (spec §3).
enum class EstimatorKind : uint8_t {
  kNone = 0,
  kPhi = 1,
  kMoment = 2,
  kCentroid = 3,       // clusters of keys, second order in their spread
  kClusterMoment = 4,  // a tilted moment estimate per cluster
  kScan = 5,           // masses by the selector's own scan, values by cluster
  kAuto = 255,
};
// "none", "phi", "moment", "centroid", "cluster_moment", "scan", "auto"
std::string_view EstimatorName(EstimatorKind kind);
Result<EstimatorKind> EstimatorFromName(std::string_view name);
inline constexpr size_t kEstimatorKinds = 6;  // without kAuto
inline constexpr std::array<std::string_view, kEstimatorKinds> kEstimatorNames = {
    "none", "phi", "moment", "centroid", "cluster_moment", "scan"};

// Where a remainder that cancels is clamped (spec §3): the signed-weight form on its whole mass, or
// the paper's parity form [38-43] on each feature, u_R = max(u - u_K, kFeatureEpsilon).
enum class PhiForm : uint8_t { kSigned = 0, kPerFeature = 1 };
// How a moment estimate reads its cut (attention/estimators/tilt.h).
enum class MomentForm : uint8_t { kDirect = 0, kParent = 1, kRank = 2 };
std::string_view MomentFormName(MomentForm form);  // "direct", "parent", "rank"

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

}  // namespace prefixd
