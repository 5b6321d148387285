#include "attention/estimators/tilt.h"

#include <algorithm>
#include <cmath>

#include "attention/estimators/normal.h"

namespace prefixd {
namespace {

constexpr double kDeepest = -30, kHighest = 40;  // range of the parent's cut, in its own deviations

// Tilts the Gaussian whose part below c the scores are; c lies a deviations above its mean.
Tilt FromParent(double mu, double c, double a) {
  const double h = NormalHazard(a);
  const double deviation = (c - mu) / (a + h);
  const double mean = c - a * deviation;
  const double t = a - deviation;
  const double variance = deviation * deviation * (1 - h * (a + h));  // variance below c
  const double tilted = mean + deviation * deviation - deviation * NormalHazard(t);
  return {LogTiltedMass(mean, deviation, c) - LogNormalCdf(a), (tilted - mu) / variance};
}

}  // namespace

Tilt TiltScores(MomentForm form, double mu, double variance, double c, double rank_depth) {
  const bool bounded = std::isfinite(c);
  if (!(c > mu) || (bounded && c - mu <= kNegligibleGap * (1 + std::fabs(c)))) return {mu, 0};
  if (form == MomentForm::kRank && std::isfinite(rank_depth) && bounded) {
    return FromParent(mu, c, std::clamp(rank_depth, kDeepest, kHighest));
  }
  if (!(variance > kNegligibleVariance)) return {mu, 0};
  const double sigma = std::sqrt(variance);
  const double t = (c - mu) / sigma - sigma;
  return {LogTiltedMass(mu, sigma, c), 1 - NormalHazard(t) / sigma};
}

}  // namespace prefixd
