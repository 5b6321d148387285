#include "attention/estimators/tilt.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>

#include "attention/estimators/normal.h"

namespace prefixd {
namespace {

constexpr double kDeepest = -30, kHighest = 40;  // range of the parent's cut, in its own deviations
constexpr size_t kCells = 1400;
constexpr double kCell = (kHighest - kDeepest) / kCells;

// Variance of a standard Gaussian cut at a, over its squared distance from mean to cut: decreases
// from 1 (a -> -inf) to 0.
double SpreadRatio(double a) {
  const double h = NormalHazard(a);
  const double distance = a + h;
  return (1 - h * distance) / (distance * distance);
}

// Returns the depth a with SpreadRatio(a) = ratio: a table finds the cell, secant steps the place
// in it.
double ParentDepth(double ratio) {
  static const std::array<double, kCells + 1> table = [] {
    std::array<double, kCells + 1> t{};
    for (size_t i = 0; i <= kCells; ++i) t[i] = SpreadRatio(kDeepest + kCell * double(i));
    return t;
  }();
  if (ratio >= table.front()) return kDeepest;
  if (ratio <= table.back()) return kHighest;
  const auto above = std::lower_bound(table.begin(), table.end(), ratio, std::greater<>());
  const size_t cell = static_cast<size_t>(above - table.begin()) - 1;
  double low = kDeepest + kCell * static_cast<double>(cell), high = low + kCell;
  double f_low = table[cell] - ratio, f_high = table[cell + 1] - ratio;
  for (int step = 0; step < 3 && f_low > f_high; ++step) {
    const double a = low + (high - low) * f_low / (f_low - f_high);
    const double f = SpreadRatio(a) - ratio;
    (f > 0 ? low : high) = a;
    (f > 0 ? f_low : f_high) = f;
  }
  return f_low > f_high ? low + (high - low) * f_low / (f_low - f_high) : low;
}

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
  if (form == MomentForm::kParent && bounded) {
    return FromParent(mu, c, ParentDepth(variance / ((c - mu) * (c - mu))));
  }
  const double sigma = std::sqrt(variance);
  const double t = (c - mu) / sigma - sigma;
  return {LogTiltedMass(mu, sigma, c), 1 - NormalHazard(t) / sigma};
}

}  // namespace prefixd
