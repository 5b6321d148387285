// One interface over all estimators of the remainder (spec §3): what each keeps of a token set is
// built from rows as they come, merged with that of other sets, stored, charged, and handed to a
// step in the same way. How each turns it into (log Z_R, y_R) is attention/estimators/step_input.h's business:
// GroupStep and EstimateRemainder evaluate whatever was attached to their input.
//
// Thread-safety: plain value; const methods may be called from any number of threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "attention/estimators/clusters.h"
#include "attention/estimators/moments.h"
#include "attention/estimators/phi_cache.h"
#include "attention/estimators/step_input.h"
#include "prefixd/estimator_variant.h"
#include "prefixd/result.h"

namespace prefixd {

// Which estimator, and how much it keeps. Borrowed pointers outlive the summaries made from it.
struct EstimatorSpec {
  EstimatorKind kind = EstimatorKind::kNone;
  uint32_t key_dim = 0, value_dim = 0;
  bool cross = false;                      // kMoment: gather C
  bool covariance = false;                 // kMoment: gather the keys' full covariance
  const FeatureMap* phi_k = nullptr;       // kPhi
  const Clustering* clustering = nullptr;  // kCentroid, kClusterMoment, kScan
  // Of what is kept for reading (EstimatorSummary::Keep):
  uint32_t rank = 0;  // kMoment: C as a factor of that rank
  bool bf16 = false;  // kPhi: u and T

  Status Validate() const;
};

class EstimatorSummary {
 public:
  // Of the empty set. kInvalidArgument when the spec lacks what its kind needs.
  static Result<EstimatorSummary> Create(const EstimatorSpec& spec);

  EstimatorKind kind() const { return spec_.kind; }
  uint64_t count() const;
  // Rows are of the spec's dimensions.
  void Add(const RowsView& rows);
  // kPhi: with features that are at hand, log phi [rows.count][d_phi]; -inf: none.
  void AddFeatures(const RowsView& rows, std::span<const float> log_phi) {
    std::get<PhiCache>(held_).AddFeatures(rows, log_phi);
  }
  // Of disjoint token sets; kInvalidArgument when the other was made from a different spec, or
  // either is for reading only (Keep).
  Status Merge(const EstimatorSummary& other);

  // What a variant of the same estimator keeps of this: for reading, after all adding and merging
  // of checkpoints. Cluster summaries serve all three estimators by clusters. query_rms: of the
  // queries' channels, for factoring C (empty: all alike). `alike`: kept by the same variant from
  // much the same tokens, to take the factor's directions from (null: find them).
  // kInvalidArgument when this holds less than the variant keeps.
  Result<EstimatorSummary> Keep(const EstimatorVariant& variant, std::span<const float> query_rms,
                                const EstimatorSummary* alike) const;
  // kCentroid, kClusterMoment, kScan: whole clusters put together as clusters of `into`, which
  // outlives this; each goes where to[cluster] says.
  Status Coarsen(std::span<const uint16_t> to, const Clustering* into);

  size_t bytes() const;  // as stored, without the envelope
  // Token-equivalents beside rows of this shape: what a budget is charged (spec §4).
  double Tokens(const RowShape& row) const;

  // `producer`: fingerprint of what made it (weights of the maps, clustering, anchors); stored
  // with it and compared when it is read back.
  std::vector<std::byte> Serialize(std::string_view producer) const;
  // kFailedPrecondition when another producer or another kind made it, kCorrupt when malformed.
  static Result<EstimatorSummary> Deserialize(const EstimatorSpec& spec, std::string_view producer,
                                              std::span<const std::byte> bytes);

  // Points the step's input at this summary, which must outlive the step: sets `estimator` and what
  // belongs to it. Left to the caller: phi_q, forms, stored features, scan masses.
  void AttachTo(GroupStepInput& in) const;

  // Null when it is of another estimator.
  const MomentSummary* moment() const { return std::get_if<MomentSummary>(&held_); }
  const PhiCache* phi() const { return std::get_if<PhiCache>(&held_); }
  const ClusterSummary* clusters() const { return std::get_if<ClusterSummary>(&held_); }

 private:
  using Held = std::variant<std::monostate, MomentSummary, PhiCache, ClusterSummary>;
  EstimatorSummary(const EstimatorSpec& spec, Held held) : spec_(spec), held_(std::move(held)) {}

  EstimatorSpec spec_;
  Held held_;
};

}  // namespace prefixd
