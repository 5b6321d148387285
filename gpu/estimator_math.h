// Scalar mathematics of the remainder, compiled for the kernels and for the host (spec §3): the
// device's form of attention/normal.h, with which tests/gpu compares it. float64, natural logs.
//
// Thread-safety: pure functions.
#pragma once

#include <math.h>

#include "attention/selection.h"
#include "gpu/host_device.h"

namespace prefixd::gpu {

PREFIXD_HD inline double Infinity() { return HUGE_VAL; }

// erfcx(x) = exp(x^2) erfc(x), for x >= 0.
PREFIXD_HD inline double Erfcx(double x) {
  if (x < 12.0) {
    // x^2 = high + low exactly, so that the exponential keeps full precision.
    const double high = x * x;
    const double low = fma(x, x, -high);
    return exp(high) * (1.0 + low) * erfc(x);
  }
  // Asymptotic series: 1/(x sqrt(pi)) * sum_n (-1)^n (2n-1)!! / (2x^2)^n.
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

// log Phi(t), Phi the standard normal distribution function.
PREFIXD_HD inline double LogNormalCdf(double t) {
  if (t < kNormalTail) return -0.5 * t * t + log(0.5 * Erfcx(-t / kSqrt2));
  if (t > 0) return log1p(-0.5 * erfc(t / kSqrt2));
  return log(0.5 * erfc(-t / kSqrt2));
}

// h(t) = pdf(t) / Phi(t).
PREFIXD_HD inline double NormalHazard(double t) {
  if (t < kNormalTail) return 0.79788456080286535588 / Erfcx(-t / kSqrt2);
  return 0.39894228040143267794 * exp(-0.5 * t * t) / (0.5 * erfc(-t / kSqrt2));
}

// Scores of smaller variance than this are one score.
inline constexpr double kNegligibleVariance = 1e-12;
// Below this share of the phi cache's mass, what is left after subtraction is rounding noise.
inline constexpr double kNegligibleShare = 1e-5;

// What an estimator says of the remainder of one query head.
struct RemainderMass {
  double log_mass = -Infinity();  // log Z_R; -inf: no mass
  double tau = 0;                 // how far the first-order value term counts (moment only)
};

// |R| exp(mean) <= Z_R, and Z_R <= |R| exp(c) under an exact cut; the lower side wins. mean = -inf
// where it is not known.
PREFIXD_HD inline double ClampToBracket(double log_mass, double log_count, double mean, Cut cut) {
  if (cut.kind == CutKind::kExact && log_mass > log_count + cut.score) {
    log_mass = log_count + cut.score;
  }
  return log_mass < log_count + mean ? log_count + mean : log_mass;
}

// The tilted moments of `count` > 0 remaining tokens whose scores have this mean and variance.
// Without a cut the Gaussian's own expected maximum stands for it.
PREFIXD_HD inline RemainderMass TiltedMoment(double count, double mean, double variance, Cut cut) {
  const double log_count = log(count);
  const double sigma = variance > 0 ? sqrt(variance) : 0.0;
  double c = cut.score;
  if (cut.kind == CutKind::kNone) c = fmin(c, mean + sigma * sqrt(2.0 * log_count));
  RemainderMass out;
  double log_mean = mean;  // scores (almost) all equal, or a cut at or below their mean
  if (variance > kNegligibleVariance && c > mean) {
    const double a = (c - mean) / sigma;
    const double t = a - sigma;
    log_mean = t < kNormalTail ? c - 0.5 * a * a + log(0.5 * Erfcx(-t / kSqrt2))
                               : mean + 0.5 * variance + LogNormalCdf(t);
    out.tau = 1.0 - NormalHazard(t) / sigma;
  }
  out.log_mass = ClampToBracket(log_count + log_mean, log_count, mean, cut);
  return out;
}

// The phi estimate: `share` of the cache's mass exp(log_mid) is left after subtraction. Also no
// mass where the maps overflowed into NaN.
PREFIXD_HD inline RemainderMass PhiRemainder(double count, double log_mid, double share,
                                             double mean, Cut cut) {
  RemainderMass out;
  if (!(share > kNegligibleShare) || !(fabs(log_mid) < Infinity())) return out;
  out.log_mass = ClampToBracket(log_mid + log(share), log(count), mean, cut);
  return out;
}

}  // namespace prefixd::gpu
