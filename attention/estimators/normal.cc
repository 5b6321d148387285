#include "attention/estimators/normal.h"

#include <cmath>
#include <limits>

namespace prefixd {
namespace {

constexpr double kSqrt2 = 1.41421356237309504880;
constexpr double kInvSqrtPi = 0.56418958354775628695;
constexpr double kSqrt2OverPi = 0.79788456080286535588;
constexpr double kInvSqrt2Pi = 0.39894228040143267794;
// Below this, log Phi(t) comes from erfcx, because Phi(t) would underflow and its logarithm cancel
// (docs/mathematics.md).
constexpr double kTail = -5.0;

}  // namespace

double Erfcx(double x) {
  if (x < 12.0) {
    // x^2 = high + low exactly, so that the exponential keeps full precision.
    const double high = x * x;
    const double low = std::fma(x, x, -high);
    return std::exp(high) * (1.0 + low) * std::erfc(x);
  }
  // Asymptotic series: 1/(x sqrt(pi)) * sum_n (-1)^n (2n-1)!! / (2x^2)^n.
  const double step = 1.0 / (2.0 * x * x);
  double term = 1.0, sum = 1.0;
  for (int n = 1; n <= 12; ++n) {
    term *= -(2 * n - 1) * step;
    sum += term;
  }
  return kInvSqrtPi / x * sum;
}

double LogNormalCdf(double t) {
  if (t < kTail) return -0.5 * t * t + std::log(0.5 * Erfcx(-t / kSqrt2));
  if (t > 0) return std::log1p(-0.5 * std::erfc(t / kSqrt2));
  return std::log(0.5 * std::erfc(-t / kSqrt2));
}

double NormalHazard(double t) {
  if (t < kTail) return kSqrt2OverPi / Erfcx(-t / kSqrt2);
  return kInvSqrt2Pi * std::exp(-0.5 * t * t) / (0.5 * std::erfc(-t / kSqrt2));
}

double LogTiltedMass(double mu, double sigma, double c) {
  if (c == std::numeric_limits<double>::infinity()) return mu + 0.5 * sigma * sigma;
  const double a = (c - mu) / sigma;
  const double t = a - sigma;
  if (t < kTail) return c - 0.5 * a * a + std::log(0.5 * Erfcx(-t / kSqrt2));
  return mu + 0.5 * sigma * sigma + LogNormalCdf(t);
}

}  // namespace prefixd
