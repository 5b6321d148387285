// Defines the input and output of one step of one KV head and its group of query heads
// (docs/mathematics.md). Estimators attach their summaries to the input; attention/step/step.h
// computes the step.
#pragma once

#include <cstdint>
#include <span>

#include "attention/estimators/clusters.h"
#include "attention/estimators/feature_map.h"
#include "attention/estimators/moments.h"
#include "attention/estimators/phi_cache.h"
#include "attention/estimators/stored_features.h"
#include "attention/rows/rows.h"
#include "prefixd/estimator_variant.h"
#include "prefixd/kv_shape.h"
#include "prefixd/selection.h"

namespace prefixd {

// A step borrows everything for the duration of the call.
struct GroupStepInput {
  std::span<const float> queries;  // [G][key_dim], after RoPE, never rounded to the row dtype
  uint32_t group = 0;              // G
  LayerGeometry layer;             // scale and softcap
  // The exact set E = anchors + retrieved. Disjoint; any may be empty. All of one RowShape.
  RowsView sinks, tail, retrieved;
  std::span<const Cut> cuts;  // [G]; empty means CutKind::kNone for all
  // [G][retrieved.count] from StepScores, where the caller has computed them before; else empty.
  std::span<const float> retrieved_scores;

  // The mid region M (retrieved tokens included): its token count, and the summary that `estimator`
  // reads (attention/estimators/estimator.h makes, merges and stores all kinds alike).
  uint64_t mid_count = 0;
  EstimatorKind estimator = EstimatorKind::kNone;  // kAuto is resolved by the caller
  // False: y and lse cover only what was read, and rho_z is the estimator's share of the remainder
  // that was dropped.
  bool merge_estimate = true;

  // kMoment; other estimators use it, if set, for the lower side of the bracket on Z_R.
  const MomentSummary* moment = nullptr;

  // kPhi. Features of retrieved rows are read where they are stored, else recomputed by phi_k.
  const PhiCache* phi = nullptr;
  PhiForm phi_form = PhiForm::kSigned;
  std::span<const FeatureMap> phi_q;  // [G]; empty: symmetric, phi_k maps queries too
  const FeatureMap* phi_k = nullptr;  // may be null with stored features and phi_q
  StoredFeatures features;

  // kCentroid, kScan: with contents of at least kCentroids, kValues.
  const ClusterSummary* clusters = nullptr;
  const Clustering* clustering = nullptr;        // finds the retrieved rows' clusters, unless
  std::span<const uint16_t> retrieved_clusters;  // [K] they are given
  ScanMasses scan;                               // kScan
};

struct GroupStepOutput {
  std::span<float> y;      // [G][value_dim]
  std::span<float> lse;    // [G], natural logarithm; -inf (and y = 0) for an empty prefix
  std::span<float> rho_z;  // [G] estimated share of the remainder, Z_R / (Z_E + Z_R) [56]
};

}  // namespace prefixd
