// Computes how much mass, and which mean, scores have below a cut: the two readings of the
// tilted-moment estimator (docs/mathematics.md). float64, one query head.
//
// The inputs are the remainder's score mean mu and variance sigma^2 and the cut c. These are
// moments of scores already cut: kDirect treats them as those of a Gaussian that is yet to be cut
// (low by 10 to 25% for Gaussian scores), kRank takes the cut's depth in its parent, the Gaussian
// before the cut, from how many tokens lie above it and needs no variance.
#pragma once

#include "prefixd/estimator_variant.h"

namespace prefixd {

// Scores whose variance is smaller count as one score.
inline constexpr double kNegligibleVariance = 1e-12;
// A cut closer than this share of (1 + |c|) to the scores' mean leaves them no room: their distance
// is the rounding of float32 scores, and a tilt by it would be of any size.
inline constexpr double kNegligibleGap = 1e-5;

struct Tilt {
  double log_mean;  // log of the mean of exp(s): log Z_R - log |R|
  // (E_tilted[s] - mu) / sigma^2: the factor on a value's regression on the score.
  double lever;
};

// rank_depth: Phi^-1 of the share of tokens below the cut, for kRank; not finite: kDirect instead.
// c may be +-inf.
Tilt TiltScores(MomentForm form, double mu, double variance, double c, double rank_depth);

}  // namespace prefixd
