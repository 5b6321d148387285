// Tests the trade-off map against the formula of [RC], evaluated directly, and contours against a
// search in small steps.
#include <cmath>
#include <random>
#include <vector>

#include "measure/map/amortised.h"
#include "measure/map/trade_off.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::bench {
namespace {

constexpr double kPhi = 100;

// Times with a fixed part and one for each token, slightly bent.
std::vector<SweepPoint> Sweep(std::mt19937_64& rng) {
  std::uniform_real_distribution<double> u(0.1, 1);
  const double a = u(rng), b = u(rng), c = u(rng), bend = u(rng);
  std::vector<SweepPoint> out;
  for (const double g : {1, 2, 3, 5, 7, 10}) {
    out.push_back({g * kPhi, {a + 0.01 * g, b * g, c * (1 + g) + bend * std::sqrt(g)}});
  }
  return out;
}

CompletedTimes Completed(std::mt19937_64& rng) {
  std::uniform_real_distribution<double> u(0.1, 1);
  return {{u(rng), u(rng), u(rng)}, 40 * u(rng) * u(rng)};
}

// The formula's t_topk at k, for points of the sweep and between them.
double DirectTopK(const std::vector<SweepPoint>& sweep, double xi, double k, bool selection) {
  for (size_t i = 1;; ++i) {
    if (k > sweep[i].k && i + 1 < sweep.size()) continue;
    const auto& [k0, a] = sweep[i - 1];
    const auto& [k1, b] = sweep[i];
    const double w = (k - k0) / (k1 - k0);
    const double compute = std::max(0.0, (1 - w) * a.compute + w * b.compute);
    const double load = std::max(0.0, (1 - w) * a.load + w * b.load);
    const double select = std::max(0.0, (1 - w) * a.select + w * b.select);
    return compute + xi * load + (selection ? select : 0.0);
  }
}

TEST(TradeOffTest, SpeedupIsTheFormula) {
  std::mt19937_64 rng(testing::Seed("TradeOffTest.SpeedupIsTheFormula"));
  for (int round = 0; round < 50; ++round) {
    const auto sweep = Sweep(rng);
    const CompletedTimes done = Completed(rng);
    const TradeOff map(sweep, kPhi);
    for (const double xi : {1.0, 3.7, 20.0, 100.0}) {
      for (const double gamma : {0.5, 1.0, 1.4, 2.0, 6.2, 10.0, 12.0}) {
        for (const double c : {1.0, 0.5, 0.25, 0.1}) {
          for (const bool with : {false, true}) {
            const double cost = done.ms.compute + c * done.estimate + xi * done.ms.load +
                                (with ? done.ms.select : 0);
            const double expected = DirectTopK(sweep, xi, gamma * kPhi, with) / cost;
            EXPECT_NEAR(map.Speedup(done, xi, gamma, c, with), expected, 1e-9 * expected);
          }
        }
      }
    }
  }
}

TEST(TradeOffTest, ContourIsWhereTheSpeedupIsOne) {
  std::mt19937_64 rng(testing::Seed("TradeOffTest.ContourIsWhereTheSpeedupIsOne"));
  int inside = 0, beyond = 0, at_one = 0;
  for (int round = 0; round < 200; ++round) {
    const TradeOff map(Sweep(rng), kPhi);
    const CompletedTimes done = Completed(rng);
    for (const double xi : LogSteps(100, 9)) {
      const auto gamma = map.BreakEvenGamma(done, xi, 0.5, true);
      if (!gamma) {
        for (double g = 1; g <= 10; g += 0.01) {
          EXPECT_LT(map.Speedup(done, xi, g, 0.5, true), 1);
        }
        ++beyond;
      } else if (*gamma == 1) {
        EXPECT_GE(map.Speedup(done, xi, 1, 0.5, true), 1);
        ++at_one;
      } else {
        EXPECT_NEAR(map.Speedup(done, xi, *gamma, 0.5, true), 1, 1e-6);
        EXPECT_LT(map.Speedup(done, xi, *gamma - 0.01, 0.5, true), 1);
        ++inside;
      }
    }
  }
  EXPECT_GT(inside, 100);
  EXPECT_GT(at_one, 100);
  EXPECT_GT(beyond, 0);
}

TEST(TradeOffTest, ExtrapolationStopsAtZero) {
  const TradeOff map({{100, {0, 1, 5}}, {200, {0, 3, 6}}}, 100);
  EXPECT_DOUBLE_EQ(map.At(50).load, 0);  // the line is at 0 there
  EXPECT_DOUBLE_EQ(map.At(10).load, 0);
  EXPECT_DOUBLE_EQ(map.At(300).load, 5);
  EXPECT_DOUBLE_EQ(map.At(10).compute, 4.1);
}

TEST(TradeOffTest, LessOfTheEstimateNeverNeedsMoreTokens) {
  std::mt19937_64 rng(testing::Seed("TradeOffTest.LessOfTheEstimateNeverNeedsMoreTokens"));
  const TradeOff map(Sweep(rng), kPhi);
  const CompletedTimes done = Completed(rng);
  for (const double xi : LogSteps(100, 25)) {
    double before = 11;
    for (const double c : {1.0, 0.5, 0.25, 0.1}) {
      const double gamma = map.BreakEvenGamma(done, xi, c, false).value_or(11);
      EXPECT_LE(gamma, before + 1e-9);
      before = gamma;
    }
  }
}

TEST(LogStepsTest, HasBothEnds) {
  const auto steps = LogSteps(100, 5);
  ASSERT_EQ(steps.size(), 5u);
  EXPECT_DOUBLE_EQ(steps.front(), 1);
  EXPECT_DOUBLE_EQ(steps.back(), 100);
  EXPECT_NEAR(steps[2], 10, 1e-9);
}

TEST(AmortisedTest, BreakEvenIsWhereTotalsAreEqual) {
  const Way attach{"attach", 100, 2}, restore{"restore", 10, 5};
  const auto tokens = BreakEvenTokens(attach, restore);
  ASSERT_TRUE(tokens.has_value());
  EXPECT_DOUBLE_EQ(*tokens, 30);
  EXPECT_DOUBLE_EQ(attach.total_ms(30), restore.total_ms(30));
  EXPECT_FALSE(BreakEvenTokens(attach, {"never", 10, 2}).has_value());
  EXPECT_DOUBLE_EQ(BreakEvenTokens(restore, attach).value_or(-1), 0);
}

}  // namespace
}  // namespace prefixd::bench
