// Names the ways to estimate the remainder for users: an estimator, what it keeps of the mid
// region, and how it reads that (docs/mathematics.md).
//
//   none
//   moment[/rR | /full][/cov]   R: rank of the cross moment C; full: all of C;
//                               cov: the keys' full covariance
//   phi[/per_feature][/bf16]    per_feature: the paper's clamp; bf16: half the cache's size
//   centroid, scan              by clusters of keys
//   auto                        per head, as measured at ingest
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

// The estimators of the remainder (docs/mathematics.md).
enum class EstimatorKind : uint8_t {
  kNone = 0,
  kPhi = 1,
  kMoment = 2,
  kCentroid = 3,  // a tilted estimate per cluster of keys, by its mean and spread
  kScan = 4,      // masses by the selector's own scan, values by cluster
  kAuto = 255,
};
// "none", "phi", "moment", "centroid", "scan", "auto"
std::string_view EstimatorName(EstimatorKind kind);
Result<EstimatorKind> EstimatorFromName(std::string_view name);
inline constexpr size_t kEstimatorKinds = 5;  // without kAuto
inline constexpr std::array<std::string_view, kEstimatorKinds> kEstimatorNames = {
    "none", "phi", "moment", "centroid", "scan"};

// Selects where a remainder that cancels is clamped (docs/mathematics.md): the signed-weight form
// clamps its whole mass, the paper's parity form [38-43] each feature, u_R = max(u - u_K,
// kFeatureEpsilon).
enum class PhiForm : uint8_t { kSigned = 0, kPerFeature = 1 };

struct EstimatorVariant {
  static constexpr uint32_t kFullRank = UINT32_MAX;

  EstimatorKind kind = EstimatorKind::kAuto;
  uint32_t rank = 0;                    // kMoment: rank of C; 0: no C, kFullRank: all of C
  bool covariance = false;              // kMoment: the keys' full covariance
  PhiForm phi_form = PhiForm::kSigned;  // kPhi
  bool bf16 = false;                    // kPhi: keeps u and T of the cache in bf16

  EstimatorVariant() = default;
  EstimatorVariant(EstimatorKind k) : kind(k) {}  // NOLINT: an estimator is its plainest variant
  auto operator<=>(const EstimatorVariant&) const = default;

  std::string Name() const;
  static Result<EstimatorVariant> Parse(std::string_view name);
  // Returns the variant without its way of reading: variants with equal Kept() share one summary.
  EstimatorVariant Kept() const;
  bool clustered() const {
    return kind == EstimatorKind::kCentroid || kind == EstimatorKind::kScan;
  }
};

// Parses "moment, scan" into both; kInvalidArgument names the wrong one. "auto" is not an element.
Result<std::vector<EstimatorVariant>> ParseVariants(std::string_view list);
std::string VariantNames(std::span<const EstimatorVariant> variants);  // for ParseVariants

}  // namespace prefixd
