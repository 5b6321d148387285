// Computes the estimated remainder R = M \ K of one group (docs/mathematics.md), in the form a step
// merges it. Internal to attention/, except CheckEstimatorInputs, which gpu/ calls as well.
#pragma once

#include <span>
#include <vector>

#include "attention/estimators/step_input.h"
#include "attention/kernels/kernels.h"
#include "attention/rows/sum_of.h"

namespace prefixd {

// Describes the remainder of each query head g:
//   Z_R = exp(log_z[g]),   y_R = constant[g] - sum_{i in K} coefficient_i v_i
// so that a retrieved row enters the step's one value pass with the signed weight
// exp(s_i) - Z_R coefficient_i. The coefficients are a line of the row's score, or given one by
// one. log_z is -inf where there is no mass; then the rest is 0.
struct Remainder {
  std::vector<double> log_z;       // [G], clamped to the bracket
  std::vector<Line> line;          // [G], or empty:
  std::vector<float> coefficient;  // [G][K]
  std::vector<double> constant;    // [G][value_dim]
};

// Sums over the retrieved keys about a centre near the mid region's mean key: per channel, the sums
// of k - centre and of its square. They are taken along with the scores, while the rows are in
// cache.
struct KeySums {
  std::vector<float> centre;
  std::vector<double> sum, sum_sq;
};

// Bundles what the estimators need beyond the step's input.
struct RemainderContext {
  const GroupStepInput& in;
  uint32_t key_dim;
  uint32_t value_dim;
  const float* scores;  // [G][ld_scores]; the first K of each row are the retrieved rows'
  size_t ld_scores;
  const KeySums& key_sums;  // empty unless NeedsKeySums

  uint32_t group() const { return in.group; }
  size_t k() const { return in.retrieved.count; }
  double remaining() const { return static_cast<double>(in.mid_count - in.retrieved.count); }
  Cut cut(uint32_t g) const { return in.cuts.empty() ? Cut{} : in.cuts[g]; }
  std::span<const float> query(uint32_t g) const {
    return in.queries.subspan(size_t{g} * key_dim, key_dim);
  }
  std::span<const float> scores_of(uint32_t g) const { return {scores + g * ld_scores, k()}; }
};

// A remainder below this share of the cache's surrogate mass is rounding noise, and counts as none
// (float32 caches, features recomputed to some 1e-6).
inline constexpr double kNegligibleShare = 1e-5;
// A key channel has no spread left when removing the retrieved rows leaves less than this share of
// the mid region's second moment: the rest is the subtraction's rounding, and the tilt divides by
// it.
inline constexpr double kNegligibleSpread = 1e-5;

// Checks that the input has everything its estimator needs, in fitting shapes.
Status CheckEstimatorInputs(const GroupStepInput& in, uint32_t key_dim, uint32_t value_dim);
// The moment estimator with a diagonal covariance subtracts sums over the retrieved keys.
bool NeedsKeySums(const GroupStepInput& in);

// Estimates the remainder by in.estimator. REQUIRES: in.mid_count > in.retrieved.count, no softcap,
// CheckEstimatorInputs succeeded.
Remainder Estimate(const RemainderContext& context);
Remainder EstimateMoment(const RemainderContext& context);
Remainder EstimatePhi(const RemainderContext& context);
Remainder EstimateClusters(const RemainderContext& context);

// ---- shared by the estimators ------------------------------------------------------------------

// Return a remainder without mass, all zero: with a line per head, or with coefficients.
Remainder EmptyLines(const RemainderContext& context);
Remainder EmptyCoefficients(const RemainderContext& context);
// Mean scores of the mid region under one query head, before and after the retrieved rows are
// removed.
struct ScoreMean {
  double of_mid = 0;         // scale q.mean_key
  double retrieved_sum = 0;  // sum over K of (s_i - of_mid)
  double of_remainder = 0;
};
// Reads in.moment, which must be set.
ScoreMean RemoveRetrieved(const RemainderContext& context, uint32_t g);
// Returns the remainder's mean score for the bracket: -inf without a moment summary.
double MeanRemainingScore(const RemainderContext& context, uint32_t g);
// Returns the cut of a tilted estimate, given the remainder's score mean and deviation
// (docs/mathematics.md): with CutKind::kNone the Gaussian's own expected maximum, or the given
// score if that is lower. A single score's cut is itself, whatever rounding made of its mean.
double TiltCut(const Cut& cut, double mean, double sigma, double remaining);
// Clamps log Z_R: |R| exp(mean) <= Z_R, and Z_R <= |R| exp(c) where there is a cut; the lower side
// wins. Under an approximate cut the upper side is no proof, but to exceed it the unread tokens
// would have to outweigh the K-th best that a search found *on average*, and an estimate of that
// kind is far likelier wrong than the search. Pass mean = -inf when it is not known. All in logs.
double ClampToBracket(double log_z, const Cut& cut, double mean, double remaining);

}  // namespace prefixd
