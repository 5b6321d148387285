#include "attention/estimators/normal.h"

#include <cmath>
#include <limits>

#include "tests/support/test.h"

namespace prefixd {
namespace {

TEST(Normal, ErfcxAgainstHighPrecisionValues) {
  // From the series of erf in 80-digit decimal arithmetic.
  const struct {
    double x, value;
  } table[] = {
      {-3, 16205.988853999586625469},
      {-0.5, 1.9523604891825570932760},
      {0, 1},
      {0.5, 0.6156903441929258748707},
      {1, 0.4275835761558070044107},
      {2, 0.2553956763105057438650},
      {5, 0.1107046377330686263702},
      {10, 0.0561409927438225858575},
      {11.9, 0.0472452324840876699523},
      {12, 0.0468542210148937626195},
      {15, 0.0375296063885057657460},
      {20, 0.0281743487410513193186},
      {50, 0.0112815362653237725001},
      {100, 0.0056416137829894329035},
  };
  for (const auto& [x, value] : table) EXPECT_NEAR(Erfcx(x) / value, 1, 1e-14) << "x = " << x;
}

TEST(Normal, ErfcxIsDecreasingAcrossItsSeam) {
  for (double x = 11.5; x < 12.5; x += 1e-3) ASSERT_GT(Erfcx(x), Erfcx(x + 1e-3)) << x;
  EXPECT_GT(Erfcx(1e300), 0);
}

TEST(Normal, LogCdfMeetsItselfAndItsSymmetry) {
  EXPECT_DOUBLE_EQ(LogNormalCdf(0), std::log(0.5));
  for (double t = -8; t <= 8; t += 0.0625) {
    // Phi(t) + Phi(-t) = 1.
    EXPECT_NEAR(std::exp(LogNormalCdf(t)) + std::exp(LogNormalCdf(-t)), 1, 1e-14) << t;
  }
  EXPECT_NEAR(LogNormalCdf(-5 - 1e-9), LogNormalCdf(-5 + 1e-9), 2e-8);
  EXPECT_NEAR(LogNormalCdf(-10), -53.23128515051247, 1e-12);
  EXPECT_NEAR(LogNormalCdf(-1e6) / -5e11, 1, 1e-10);
  EXPECT_EQ(LogNormalCdf(std::numeric_limits<double>::infinity()), 0);
}

TEST(Normal, HazardIsTheDerivativeOfLogCdf) {
  for (double t = -30; t < 6; t += 0.37) {
    const double h = 1e-5;
    const double slope = (LogNormalCdf(t + h) - LogNormalCdf(t - h)) / (2 * h);
    EXPECT_NEAR(NormalHazard(t), slope, 1e-6 * (1 + std::abs(t))) << t;
  }
  EXPECT_EQ(NormalHazard(std::numeric_limits<double>::infinity()), 0);
}

// log of the integral of exp(s) pdf(s; mu, sigma) over s <= c, by the trapezoid rule.
double Quadrature(double mu, double sigma, double c) {
  const double low = std::min(c, mu + sigma * sigma) - 12 * sigma;
  const double high = std::min(c, mu + sigma * sigma + 12 * sigma);
  const int steps = 400000;
  const double dx = (high - low) / steps;
  double sum = 0;
  for (int i = 0; i <= steps; ++i) {
    const double s = low + i * dx, z = (s - mu) / sigma;
    sum += (i == 0 || i == steps ? 0.5 : 1) * std::exp(s - high - 0.5 * z * z);
  }
  return high + std::log(sum * dx / (sigma * std::sqrt(2 * M_PI)));
}

TEST(Normal, TiltedMassMatchesQuadrature) {
  for (double mu : {-7.0, 0.0, 20.0}) {
    for (double sigma : {0.05, 0.7, 2.0, 6.0}) {
      for (double above : {0.01, 0.5, 2.0, 5.0}) {
        const double c = mu + above * sigma;
        EXPECT_NEAR(LogTiltedMass(mu, sigma, c), Quadrature(mu, sigma, c), 1e-6)
            << "mu " << mu << " sigma " << sigma << " c " << c;
      }
      EXPECT_DOUBLE_EQ(LogTiltedMass(mu, sigma, std::numeric_limits<double>::infinity()),
                       mu + sigma * sigma / 2);
    }
  }
}

TEST(Normal, TiltedMassStaysFiniteForAWideGaussianFarBelowItsMean) {
  // t = -300: the naive form is log(0).
  const double value = LogTiltedMass(0, 300, 1);
  EXPECT_TRUE(std::isfinite(value));
  EXPECT_LT(value, 1);
  EXPECT_GT(value, -8);
}

}  // namespace
}  // namespace prefixd
