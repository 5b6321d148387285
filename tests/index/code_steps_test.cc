#include "index/code_search/code_steps.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "tests/support/seed.h"

namespace prefixd::index {
namespace {

// Mean squared miss of the nearest code, in float64.
double Missed(const std::vector<float>& x, double low, double step, uint32_t levels) {
  double sum = 0;
  for (const double v : x) {
    const double c = step > 0 ? std::clamp(std::nearbyint((v - low) / step), 0.0, levels - 1.0) : 0;
    const double miss = v - low - step * c;
    sum += miss * miss / double(x.size());
  }
  return sum;
}

// The least of many tries, in float64.
double LeastMissed(const std::vector<float>& x, uint32_t levels) {
  const auto [least, most] = std::minmax_element(x.begin(), x.end());
  const double middle = (double{*most} + *least) / 2, range = double{*most} - *least;
  double mean = 0, best = Missed(x, *least, range / (levels - 1), levels);
  for (const double v : x) mean += v / double(x.size());
  for (double width = 0.02; width <= 1; width *= 1.1) {
    for (const double centre : {middle, mean}) {
      const double step = width * range / (levels - 1);
      best = std::min(best, Missed(x, centre - width * range / 2, step, levels));
    }
  }
  return best;
}

TEST(FitSteps, MissesLittleMoreThanTheBestOfManyTries) {
  std::mt19937_64 random(testing::Seed("FitSteps"));
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> uniform(-1, 1);
  for (const uint32_t levels : {4u, 16u, 64u, 256u}) {
    for (const size_t n : {2000u, 2001u, 2003u}) {
      for (const float scale : {1e-20f, 1.0f, 1e12f}) {
        for (const float offset : {0.0f, 3.0f}) {
          std::vector<float> gaussian(n), flat(n), tailed(n);
          for (size_t i = 0; i < n; ++i) {
            gaussian[i] = scale * (offset + normal(random));
            flat[i] = scale * (offset + uniform(random));
            const float z = normal(random);
            tailed[i] = scale * (offset + z * z * z);
          }
          for (const auto& x : {gaussian, flat, tailed}) {
            const Steps steps = FitSteps(x, levels);
            ASSERT_GT(steps.step, 0);
            const double missed = Missed(x, steps.low, steps.step, levels);
            EXPECT_LE(missed, 1.15 * LeastMissed(x, levels))
                << levels << " levels, times " << scale;
            EXPECT_NEAR(steps.error / double(n), missed, 0.01 * missed);
          }
        }
      }
    }
  }
}

TEST(FitSteps, FewValuesAndEqualOnes) {
  EXPECT_EQ(FitSteps(std::vector<float>(100, 2.5f), 16).step, 0);
  EXPECT_NEAR(FitSteps(std::vector<float>(100, 2.5f), 16).low, 2.5, 1e-9);
  EXPECT_EQ(FitSteps(std::vector<float>{7}, 4).step, 0);
  const std::vector<float> two = {-1, 3};
  const Steps steps = FitSteps(two, 4);
  EXPECT_NEAR(Missed(two, steps.low, steps.step, 4), 0, 1e-9);
}

}  // namespace
}  // namespace prefixd::index
