// Computes docs/mathematics.md in float64, the truth that every kernel is compared with: slow and
// obvious, formula by formula, sharing no arithmetic with the fast paths. For tests and for
// measuring errors.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/estimators/feature_map.h"
#include "attention/estimators/moments.h"
#include "attention/estimators/phi_cache.h"
#include "attention/rows/rows.h"
#include "attention/step/step.h"

namespace prefixd::reference {

// Attention states of n query heads, and the quantities in the error bounds of step.h.
struct States {
  std::vector<double> y;              // [n][value_dim]
  std::vector<double> lse;            // [n], -inf without any token
  std::vector<double> rho_z;          // [n] (0 for exact attention)
  std::vector<double> abs_y;          // [n][value_dim] sum p |v|, including the remainder's share
  std::vector<double> max_abs_score;  // [n] max |s|
};

// scores[i] = softcap(scale * q.k_i).
std::vector<double> Scores(std::span<const float> query, const LayerGeometry& layer,
                           const RowsView& rows);
States ExactAttention(std::span<const float> queries, uint32_t n_queries,
                      const LayerGeometry& layer, const RowsView& rows);
// log phi(x), [d_phi].
std::vector<double> LogPhi(const FeatureMap& map, std::span<const float> x);

using prefixd::PhiForm;

// One query head's remainder, log Z_R (after the bracket) and y_R [value_dim].
struct Estimate {
  double log_z;
  std::vector<double> y;
  double share;  // left of the summary (its tokens, its spread) after subtraction; rounding grows
                 // by 1 / share
};
// The inputs are those of GroupStep; `g` is the query head. The mid region must not be empty after
// retrieval.
Estimate EstimateMoment(const GroupStepInput& in, uint32_t g);
Estimate EstimatePhi(const GroupStepInput& in, uint32_t g, PhiForm form);

// kCentroid, kScan, computed from the rows of the remainder: nothing is subtracted
// from a summary. `rest`: the mid region's rows that were not retrieved.
Estimate EstimateClusters(const GroupStepInput& in, uint32_t g, const RowsView& rest);

// Computes the step with the estimator that `in` names: none, moment, phi with features
// recomputed. Inputs are trusted: nothing is validated.
States GroupStep(const GroupStepInput& in, uint32_t value_dim);

}  // namespace prefixd::reference
