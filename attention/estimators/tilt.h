// Computes how much mass, and which mean, scores have below a cut, for the tilted-moment estimator
// (docs/mathematics.md). float64, one query head.
//
// The inputs are the remainder's score mean mu and variance sigma^2 and the cut c. These are
// moments of scores already cut, treated as those of a Gaussian that is yet to be cut: low by 10 to
// 25% for Gaussian scores.
#pragma once

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

// c may be +-inf.
Tilt TiltScores(double mu, double variance, double c);

}  // namespace prefixd
