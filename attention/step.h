// One retrieval-completion step of one KV head and its group of query heads (spec §2):
// exact attention over anchors and retrieved rows, the estimated remainder, one normalisation.
//
// CPU. No threads of its own: callers parallelise over groups. The float64 truth with the same
// signature is in attention/reference.h; gpu/ implements the same contract for device buffers.
#pragma once

#include <cstdint>
#include <span>

#include "attention/clusters.h"
#include "attention/feature_map.h"
#include "attention/moments.h"
#include "attention/phi_cache.h"
#include "attention/rows.h"
#include "attention/stored_features.h"
#include "attention/tilt.h"
#include "prefixd/estimator_variant.h"
#include "prefixd/result.h"
#include "prefixd/selection.h"

namespace prefixd {

// Everything is borrowed for the duration of the call.
struct GroupStepInput {
  std::span<const float> queries;  // [G][key_dim], after RoPE, never rounded to the row dtype
  uint32_t group = 0;              // G
  LayerGeometry layer;             // scale and softcap
  // Exact set E = anchors + retrieved. Disjoint; any may be empty. All of one RowShape.
  RowsView sinks, tail, retrieved;
  std::span<const Cut> cuts;  // [G]; empty means CutKind::kNone for all
  // [G][retrieved.count] from StepScores, where the caller needed them before; else empty.
  std::span<const float> retrieved_scores;

  // The mid region M (retrieved tokens included): how many tokens, and the summary of it that
  // `estimator` reads (attention/estimator.h makes, merges and stores all kinds alike).
  uint64_t mid_count = 0;
  EstimatorKind estimator = EstimatorKind::kNone;  // kAuto is resolved by the caller
  // False: y and lse are of what was read alone, and rho_z says what share the estimator makes of
  // the remainder that was dropped.
  bool merge_estimate = true;

  // kMoment; with the others, if there, for the lower side of the bracket on Z_R.
  const MomentSummary* moment = nullptr;
  MomentForm moment_form = MomentForm::kDirect;

  // kPhi. Features of retrieved rows are read where they are stored, else recomputed by phi_k.
  const PhiCache* phi = nullptr;
  PhiForm phi_form = PhiForm::kSigned;
  std::span<const FeatureMap> phi_q;  // [G]; empty: symmetric, phi_k is the map of queries too
  const FeatureMap* phi_k = nullptr;  // may be null with stored features and phi_q
  StoredFeatures features;

  // kCentroid, kClusterMoment, kScan: contents of at least kCentroids, kMoments, kValues.
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

// kInvalidArgument: shapes disagree; NaN or Inf in a query, key or value (the message names the
// tensor and row); an estimator asked for in a layer with a softcap. On error nothing in `out` is
// meaningful. Error bound without estimator, for rows of any dtype as stored:
// |y - y64| <= (2e-6 + 4e-7 max|s|) * sum p|v|; scores are float64 sums, so that terms which cancel
// leave no rounding behind.
//
// A summary must be of exactly the mid region: its count is compared with mid_count. A kNone cut
// never bounds Z_R from above.
Status GroupStep(const GroupStepInput& in, const GroupStepOutput& out);

// scores[g][i] = scale * q_g . k_i, [G][rows.count], before any softcap: what GroupStep computes of
// its retrieved rows, with the same bits, their values asked for meanwhile. Queries finite.
void StepScores(std::span<const float> queries, uint32_t group, const LayerGeometry& layer,
                const RowsView& rows, std::span<float> scores);
// The same of rows [begin, begin + n) alone, into their places; those that follow are asked for
// meanwhile.
void StepScores(std::span<const float> queries, uint32_t group, const LayerGeometry& layer,
                const RowsView& rows, size_t begin, size_t n, std::span<float> scores);

// What the step takes the remainder to be: log Z_R [G], after the bracket, and y_R
// [G][value_dim]; -inf and 0 where there is none. For diagnostics and per-head choice; errors as
// GroupStep.
Status EstimateRemainder(const GroupStepInput& in, std::span<float> log_z, std::span<float> y);

// Exact attention of `n_queries` query rows over `rows` in one streaming pass: queries
// [n][key_dim] -> y [n][value_dim], lse [n]. Used for full attention and for suffix queries.
Status ExactAttention(std::span<const float> queries, uint32_t n_queries,
                      const LayerGeometry& layer, const RowsView& rows, std::span<float> y,
                      std::span<float> lse);

// scores[g * ld + i] = softcap(scale * q_g . k_i) for g < G, i < rows.count <= ld; what lies
// between stays as it was. For exact selection.
void Scores(std::span<const float> queries, uint32_t group, const LayerGeometry& layer,
            const RowsView& rows, std::span<float> scores, size_t ld);
// Densely: [G][rows.count].
inline void Scores(std::span<const float> queries, uint32_t group, const LayerGeometry& layer,
                   const RowsView& rows, std::span<float> scores) {
  Scores(queries, group, layer, rows, scores, rows.count);
}

}  // namespace prefixd
