#include "attention/estimators/tilt.h"

#include <cmath>

#include "attention/estimators/normal.h"

namespace prefixd {

Tilt TiltScores(double mu, double variance, double c) {
  if (!(c > mu) || (std::isfinite(c) && c - mu <= kNegligibleGap * (1 + std::fabs(c)))) {
    return {mu, 0};
  }
  if (!(variance > kNegligibleVariance)) return {mu, 0};
  const double sigma = std::sqrt(variance);
  const double t = (c - mu) / sigma - sigma;
  return {LogTiltedMass(mu, sigma, c), 1 - NormalHazard(t) / sigma};
}

}  // namespace prefixd
