// Computes the token-equivalent read budget ([RC] App. D).
// Pure functions.
#pragma once

#include <cstdint>

#include "prefixd/estimator_variant.h"
#include "prefixd/kv_shape.h"
#include "prefixd/partition.h"
#include "prefixd/result.h"

namespace prefixd {

// Token-equivalents of a stored phi cache: (b_phi/b)(d_phi/2 + d_phi/dh) for dv = dh, eq. [47].
double PhiTokens(const RowShape& row, uint32_t d_phi, uint32_t phi_bytes_per_element);
// Token-equivalents of a moment summary: mean key, diagonal variance, mean value, and with
// cross_rank r the factor of the cross moment (r * (key_dim + value_dim) elements); r = key_dim
// stands for the whole key_dim x value_dim matrix.
double MomentTokens(const RowShape& row, uint32_t cross_rank, uint32_t bytes_per_element);

// Token-equivalents that stored features add to each retrieved token: d_phi elements of `bits`.
double FeatureTokens(const RowShape& row, uint32_t d_phi, uint32_t bits);

// Says how many mid tokens a budget of `fraction` of the prefix pays for, per KV head and step.
struct BudgetPlan {
  uint32_t total_tokens = 0;  // n(f) = ceil(f N), eq. [13]
  uint32_t anchor_tokens = 0;
  double estimator_tokens = 0;  // cost of the summary, divided by l_gen
  uint32_t k = 0;               // retrieved tokens, eqs. [14], [16], [18]
};
// l_gen: generated tokens over which the summary is amortised; 1 charges it in full to one step
// (then it is rounded up to whole tokens). kInfeasible when n(f) cannot pay for the anchors and the
// summary. fraction in (0, 1]. token_cost: cost of one retrieved token in tokens, 1 plus
// FeatureTokens where features are read beside rows.
Result<BudgetPlan> PlanBudget(uint32_t n_tokens, Anchors anchors, double fraction,
                              double estimator_tokens, uint32_t l_gen = 1, double token_cost = 1);

// Returns the cost of what the variant keeps beside rows of this shape, in token-equivalents: its
// stored bytes over the bytes of a row. d_phi: the maps', 0 without; clusters: how many there are.
double VariantTokens(const EstimatorVariant& variant, const RowShape& row, uint32_t d_phi,
                     uint32_t clusters);

}  // namespace prefixd
