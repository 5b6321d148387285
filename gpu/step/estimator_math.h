// Computes the scalar mathematics of the remainder, compiled for the kernels and for the host (spec
// §3): the device's form of attention/estimators/normal.h and attention/estimators/tilt.h, with
// which tests/gpu compares it. float64, natural logs.
//
// Thread-safety: pure functions.
#pragma once

#include <math.h>

#include "attention/estimators/tilt.h"
#include "prefixd/host_device.h"
#include "prefixd/selection.h"

namespace prefixd::gpu {

PREFIXD_HD inline double Infinity() { return HUGE_VAL; }

// Returns erfcx(x) = exp(x^2) erfc(x), for x >= 0.
PREFIXD_HD inline double Erfcx(double x) {
  if (x < 12.0) {
    // The split x^2 = high + low is exact, so that the exponential keeps full precision.
    const double high = x * x;
    const double low = fma(x, x, -high);
    return exp(high) * (1.0 + low) * erfc(x);
  }
  // The asymptotic series is 1/(x sqrt(pi)) * sum_n (-1)^n (2n-1)!! / (2x^2)^n.
  const double step = 1.0 / (2.0 * x * x);
  double term = 1.0, sum = 1.0;
  for (int n = 1; n <= 12; ++n) {
    term *= -(2 * n - 1) * step;
    sum += term;
  }
  return 0.56418958354775628695 / x * sum;
}

inline constexpr double kSqrt2 = 1.41421356237309504880;
// Below this, Phi(t) is formed from erfcx: it would underflow, and its logarithm cancel.
inline constexpr double kNormalTail = -5.0;

// Does what TiltScores of attention/estimators/tilt.h does.
PREFIXD_HD inline Tilt TiltOf(double mu, double variance, double c) {
  const bool bounded = c < Infinity();
  if (!(c > mu) || (bounded && c - mu <= kNegligibleGap * (1.0 + fabs(c)))) return {mu, 0};
  if (!(variance > kNegligibleVariance)) return {mu, 0};
  const double sigma = sqrt(variance);
  if (!bounded) return {mu + 0.5 * sigma * sigma, 1.0};
  // LogTiltedMass and NormalHazard of attention/, which share their special functions: each takes a
  // thread of a device a good part of a microsecond.
  const double a = (c - mu) / sigma, t = a - sigma;
  if (t < kNormalTail) {
    const double scaled = Erfcx(-t / kSqrt2);
    return {c - 0.5 * a * a + log(0.5 * scaled), 1.0 - 0.79788456080286535588 / scaled / sigma};
  }
  const double smaller = 0.5 * erfc(fabs(t) / kSqrt2);
  const double cdf = t > 0 ? 1.0 - smaller : smaller;
  const double log_cdf = t > 0 ? log1p(-smaller) : log(smaller);
  const double hazard = 0.39894228040143267794 * exp(-0.5 * t * t) / cdf;
  return {mu + 0.5 * sigma * sigma + log_cdf, 1.0 - hazard / sigma};
}

// Returns the cut that a tilted estimate uses: with CutKind::kNone the Gaussian's own expected
// maximum of `remaining` scores, or the given score if that is lower. A single score is its own.
PREFIXD_HD inline double TiltCutOf(Cut cut, double mean, double sigma, double remaining) {
  if (remaining <= 1) return mean;
  if (cut.kind != CutKind::kNone) return cut.score;
  return fmin(double{cut.score}, mean + sigma * sqrt(2.0 * log(remaining)));
}

// Below this share of the phi cache's mass, what is left after subtraction is rounding noise: that
// of float32 caches and of features recomputed on tensor cores (prefixd/gpu/phi_pack.h).
inline constexpr double kNegligibleShare = 1e-4;
// A key channel whose second moment falls below this share of the mid region's once the retrieved
// rows are removed counts as zero: what is left is the subtraction's rounding, and the tilt divides
// by it.
inline constexpr double kNegligibleSpread = 1e-5;

// A RemainderMass is an estimator's result for the remainder of one query head.
struct RemainderMass {
  double log_mass = -Infinity();  // log Z_R; -inf: no mass
  double lever = 0;               // weight of the first-order value term (moment only)
};

// Clamps to |R| exp(mean) <= Z_R, and to Z_R <= |R| exp(c) where there is a cut
// (attention/estimators/remainder.h); the lower side wins. mean = -inf where it is not known.
PREFIXD_HD inline double ClampToBracket(double log_mass, double log_count, double mean, Cut cut) {
  if (cut.kind != CutKind::kNone && log_mass > log_count + cut.score) {
    log_mass = log_count + cut.score;
  }
  return log_mass < log_count + mean ? log_count + mean : log_mass;
}

// Returns the tilted moments of `count` > 0 remaining tokens whose scores have this mean and
// variance.
PREFIXD_HD inline RemainderMass TiltedMoment(double count, double mean, double variance, Cut cut) {
  const double c = TiltCutOf(cut, mean, variance > 0 ? sqrt(variance) : 0.0, count);
  const Tilt tilt = TiltOf(mean, variance, c);
  const double log_count = log(count);
  return {ClampToBracket(log_count + tilt.log_mean, log_count, mean, cut), tilt.lever};
}

// Returns the phi estimate: `share` of the cache's mass exp(log_mid) is left after subtraction.
// Maps that overflowed into NaN give no mass too.
PREFIXD_HD inline RemainderMass PhiRemainder(double count, double log_mid, double share,
                                             double mean, Cut cut) {
  RemainderMass out;
  if (!(share > kNegligibleShare) || !(fabs(log_mid) < Infinity())) return out;
  out.log_mass = ClampToBracket(log_mid + log(share), log(count), mean, cut);
  return out;
}

}  // namespace prefixd::gpu
