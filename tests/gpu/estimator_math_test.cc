// The scalar mathematics the kernels use, against attention/'s on the CPU.
#include "gpu/step/estimator_math.h"

#include <algorithm>
#include <cmath>

#include "attention/estimators/normal.h"
#include "attention/estimators/remainder.h"
#include "tests/support/infinity.h"
#include "tests/support/random_kv.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::gpu {
namespace {

using prefixd::testing::Random;

using prefixd::testing::kInf;

double Relative(double x) { return 1e-12 * (1 + std::fabs(x)); }

TEST(EstimatorMath, ErfcxAgreesWithAttention) {
  for (double x = 0; x < 80; x += 0.11) {
    ASSERT_NEAR(Erfcx(x), prefixd::Erfcx(x), Relative(prefixd::Erfcx(x))) << "x = " << x;
  }
}

TEST(EstimatorMath, ConstantsAreAttentions) {
  EXPECT_EQ(kNegligibleVariance, prefixd::kNegligibleVariance);
  EXPECT_EQ(kNegligibleSpread, prefixd::kNegligibleSpread);
}

TEST(EstimatorMath, TiltedMomentAgreesWithAttention) {
  Random random(prefixd::testing::Seed("EstimatorMath.TiltedMoment"));
  for (int i = 0; i < 3000; ++i) {
    const double count = random.Int(1, 1000000), mean = random.Uniform(-80, 80);
    const double sigma = std::exp(random.Uniform(-9, 3)), variance = sigma * sigma;
    const auto score = static_cast<float>(mean + sigma * random.Uniform(-2, 8));
    const Cut cuts[] = {{kInf, CutKind::kNone},
                        {score, CutKind::kNone},
                        {score, CutKind::kApproximate},
                        {score, CutKind::kExact},
                        {kInf, CutKind::kExact}};
    for (const Cut& cut : cuts) {
      const double c = TiltCut(cut, mean, sigma, count);
      const Tilt tilt = TiltScores(mean, variance, c);
      const double want =
          prefixd::ClampToBracket(std::log(count) + tilt.log_mean, cut, mean, count);
      const RemainderMass got = TiltedMoment(count, mean, variance, cut);
      ASSERT_NEAR(got.lever, tilt.lever, 1e-6 * (1 + std::fabs(tilt.lever)));
      ASSERT_NEAR(got.log_mass, want, 1e-8 * (1 + std::fabs(want)))
          << "count " << count << " mean " << mean << " sigma " << sigma << " cut " << cut.score;
      ASSERT_GE(got.log_mass, std::log(count) + mean - 1e-9);
      if (cut.kind == CutKind::kExact && cut.score > mean) {
        ASSERT_LE(got.log_mass, std::log(count) + double{cut.score} + 1e-9);
      }
    }
  }
}

TEST(EstimatorMath, DegenerateRemaindersHaveTheirExactMass) {
  const Cut none{kInf, CutKind::kNone};
  const auto tilted = [](double mean, double variance, Cut cut) {
    return TiltedMoment(7, mean, variance, cut);
  };
  EXPECT_NEAR(tilted(1.5, 0, none).log_mass, std::log(7) + 1.5, 1e-12);
  EXPECT_EQ(tilted(1.5, 0, none).lever, 0.0);
  // A cut below the mean contradicts it: the lower side of the bracket holds.
  EXPECT_NEAR(tilted(1.5, 4, {1.0f, CutKind::kExact}).log_mass, std::log(7) + 1.5, 1e-12);
  EXPECT_TRUE(std::isnan(tilted(std::nan(""), 4, none).log_mass));
}

TEST(EstimatorMath, PhiRemainderDropsNoiseAndStaysInItsBracket) {
  const Cut none{kInf, CutKind::kNone};
  const double lowest = -Infinity();
  EXPECT_NEAR(PhiRemainder(10, 3, 0.5, lowest, none).log_mass, 3 + std::log(0.5), 1e-12);
  for (const double share : {0.0, -0.1, 1e-7, std::nan("")}) {
    EXPECT_EQ(PhiRemainder(10, 3, share, lowest, none).log_mass, lowest);
  }
  EXPECT_EQ(PhiRemainder(10, std::nan(""), 1, lowest, none).log_mass, lowest);
  const Cut cut{-1.0f, CutKind::kExact};
  EXPECT_NEAR(PhiRemainder(10, 30, 1, lowest, cut).log_mass, std::log(10) - 1, 1e-12);
  EXPECT_NEAR(PhiRemainder(10, -30, 1, -2, cut).log_mass, std::log(10) - 2, 1e-12);
}

}  // namespace
}  // namespace prefixd::gpu
