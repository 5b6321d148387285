// The estimated remainder R = M \ K of one group (spec §3), in the form a step merges it.
// Internal to attention/.
#pragma once

#include <span>
#include <vector>

#include "attention/step.h"

namespace prefixd {

// For each query head g:
//   Z_R = exp(log_z[g]),   y_R = constant[g] - sum_{i in K} coefficient[g][i] v_i
// so that a retrieved row enters the step's one value pass with the signed weight
// exp(s_i) - Z_R coefficient[g][i]. log_z is -inf where there is no mass; then the rest is 0.
struct Remainder {
  std::vector<double> log_z;       // [G], clamped to the bracket
  std::vector<float> coefficient;  // [G][K]
  std::vector<double> constant;    // [G][value_dim]
};

// What the estimators need beyond the step's input.
struct RemainderContext {
  const GroupStepInput& in;
  uint32_t key_dim;
  uint32_t value_dim;
  const float* scores;  // [G][ld_scores]; the first K of each row are the retrieved rows'
  size_t ld_scores;
};

// Below this share of the cache's surrogate mass, what is left after subtraction is rounding noise
// and counts as none (float32 caches, features recomputed to some 1e-6).
inline constexpr double kNegligibleShare = 1e-5;
// A key channel whose second moment falls below this share of the mid region's once the retrieved
// rows are removed has none: what is left is the subtraction's rounding, and the tilt divides by
// it.
inline constexpr double kNegligibleSpread = 1e-5;
// Scores of smaller variance than this are one score.
inline constexpr double kNegligibleVariance = 1e-12;

// REQUIRES: in.mid_count > in.retrieved.count, no softcap, summaries of the right shapes.
Remainder EstimateMoment(const RemainderContext& context);
Remainder EstimatePhi(const RemainderContext& context);

// The cut that a tilted estimate uses, given the remainder's score mean and deviation (spec §2):
// with CutKind::kNone the Gaussian's own expected maximum, or the given score if that is lower.
double TiltCut(const Cut& cut, double mean, double sigma, double remaining);
// |R| exp(mean) <= Z_R, and Z_R <= |R| exp(c) under an exact cut; the lower side wins. Pass
// mean = -inf when it is not known. In logs.
double ClampToBracket(double log_z, const Cut& cut, double mean, double remaining);

}  // namespace prefixd
