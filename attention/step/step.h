// Computes one step of one KV head and its group of query heads (docs/mathematics.md): exact
// attention over anchors and retrieved rows, the estimated remainder, one normalisation.
//
// CPU, without threads of its own: callers parallelise over groups. attention/reference/reference.h
// has the float64 truth with the same signature; gpu/ implements the same contract for device
// buffers.
#pragma once

#include <cstdint>
#include <span>

#include "attention/estimators/step_input.h"
#include "attention/rows/rows.h"
#include "prefixd/kv_shape.h"
#include "prefixd/result.h"

namespace prefixd {

// kInvalidArgument: shapes disagree; NaN or Inf in a query, key or value (the message names the
// tensor and row); an estimator in a layer with a softcap. On error `out` holds nothing meaningful.
// Error bound without estimator, for rows of any dtype as stored:
// |y - y64| <= (2e-6 + 4e-7 max|s|) * sum p|v|; scores are float64 sums, so that terms which cancel
// leave no rounding behind.
//
// A summary must cover exactly the mid region: its count is compared with mid_count. A kNone cut
// never bounds Z_R from above.
Status GroupStep(const GroupStepInput& in, const GroupStepOutput& out);

// scores[g][i] = scale * q_g . k_i, [G][rows.count], before any softcap: the scores that GroupStep
// computes for its retrieved rows, with the same bits. Prefetches their values meanwhile. Queries
// must be finite.
void StepScores(std::span<const float> queries, uint32_t group, const LayerGeometry& layer,
                const RowsView& rows, std::span<float> scores);
// Scores rows [begin, begin + n) alone, into their places; prefetches the rows that follow.
void StepScores(std::span<const float> queries, uint32_t group, const LayerGeometry& layer,
                const RowsView& rows, size_t begin, size_t n, std::span<float> scores);

// Returns the step's estimate of the remainder: log Z_R [G], after the bracket, and y_R
// [G][value_dim]; -inf and 0 where there is none. For diagnostics and per-head choice; errors are
// those of GroupStep.
Status EstimateRemainder(const GroupStepInput& in, std::span<float> log_z, std::span<float> y);

// Computes exact attention of `n_queries` query rows over `rows` in one streaming pass: queries
// [n][key_dim] -> y [n][value_dim], lse [n]. For full attention and suffix queries.
Status ExactAttention(std::span<const float> queries, uint32_t n_queries,
                      const LayerGeometry& layer, const RowsView& rows, std::span<float> y,
                      std::span<float> lse);

// scores[g * ld + i] = softcap(scale * q_g . k_i) for g < G, i < rows.count <= ld; the gaps between
// rows of scores stay unchanged. For exact selection.
void Scores(std::span<const float> queries, uint32_t group, const LayerGeometry& layer,
            const RowsView& rows, std::span<float> scores, size_t ld);
// Writes densely: [G][rows.count].
inline void Scores(std::span<const float> queries, uint32_t group, const LayerGeometry& layer,
                   const RowsView& rows, std::span<float> scores) {
  Scores(queries, group, layer, rows, scores, rows.count);
}

}  // namespace prefixd
