// Unifies all estimators of the remainder behind one interface (docs/mathematics.md): summaries are
// built from rows as they come, merged with those of other sets, stored, charged, and attached to a
// step in the same way. attention/estimators/step_input.h defines what a step reads of them:
// GroupStep and EstimateRemainder evaluate whatever is attached to their input.
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

// Selects an estimator, and how much it keeps. Borrowed pointers outlive the summaries made from
// it.
struct EstimatorSpec {
  EstimatorKind kind = EstimatorKind::kNone;
  uint32_t key_dim = 0, value_dim = 0;
  bool cross = false;                      // kMoment: gather C
  bool covariance = false;                 // kMoment: gather the keys' full covariance
  const FeatureMap* phi_k = nullptr;       // kPhi
  const Clustering* clustering = nullptr;  // kCentroid, kScan
  // The rest applies to summaries kept for reading (EstimatorSummary::Keep).
  uint32_t rank = 0;  // kMoment: rank of the factor kept for C
  bool bf16 = false;  // kPhi: u and T

  Status Validate() const;
};

class EstimatorSummary {
 public:
  // Returns an empty summary. kInvalidArgument when the spec lacks what its kind needs.
  static Result<EstimatorSummary> Create(const EstimatorSpec& spec);

  EstimatorKind kind() const { return spec_.kind; }
  uint64_t count() const;
  // `rows` must have the spec's dimensions.
  void Add(const RowsView& rows);
  // kPhi: adds rows with given features, log phi [rows.count][d_phi]; -inf: none. See
  // PhiCache::AddFeatures.
  void AddFeatures(const RowsView& rows, std::span<const float> log_phi,
                   std::span<const uint32_t> outweighing) {
    std::get<PhiCache>(held_).AddFeatures(rows, log_phi, outweighing);
  }
  // Adds the summary of a disjoint token set; kInvalidArgument when the specs differ, or when
  // either summary is for reading only (Keep).
  Status Merge(const EstimatorSummary& other);

  // Reduces this to what a variant of the same estimator keeps: a summary for reading, made after
  // all adding and merging. Cluster summaries serve both estimators by clusters. query_rms:
  // root mean square per query channel, which weighs the factoring of C (empty: all alike).
  // `alike`: a summary that the same variant kept from much the same tokens, whose factor
  // directions are reused (null: find them). kInvalidArgument when this holds less than the variant
  // keeps.
  Result<EstimatorSummary> Keep(const EstimatorVariant& variant, std::span<const float> query_rms,
                                const EstimatorSummary* alike) const;
  // kCentroid, kScan: joins whole clusters into clusters of `into`, which outlives
  // this; each cluster becomes part of to[cluster].
  Status Coarsen(std::span<const uint16_t> to, const Clustering* into);

  size_t bytes() const;  // as stored, without the envelope
  size_t memory_bytes() const;
  // Returns the token-equivalents that a budget is charged beside rows of this shape
  // (docs/mathematics.md).
  double Tokens(const RowShape& row) const;

  // producer: fingerprint of what made the summary (weights of the maps, clustering, anchors). It
  // is stored with the summary, and compared on reading.
  std::vector<std::byte> Serialize(std::string_view producer) const;
  // kFailedPrecondition when another producer or another kind made it, kCorrupt when malformed.
  static Result<EstimatorSummary> Deserialize(const EstimatorSpec& spec, std::string_view producer,
                                              std::span<const std::byte> bytes);

  // Points the step's input at this summary, which must outlive the step: sets `estimator` and what
  // belongs to it. The caller sets phi_q, phi_form, stored features and scan masses.
  void AttachTo(GroupStepInput& in) const;

  // Null for other estimators.
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
