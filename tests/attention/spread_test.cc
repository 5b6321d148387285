// Tests how a budget is spread over heads by what each was measured to lose.
#include "attention/step/spread.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/support/random_kv.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::Random;

LossCurve Power(double at_100, double exponent, uint32_t equal) {
  LossCurve curve{{}, equal};
  for (const double tokens : {20.0, 50.0, 100.0, 250.0, 500.0, 1000.0}) {
    curve.points.push_back({tokens, at_100 * std::pow(tokens / 100, -exponent)});
  }
  return curve;
}

uint64_t SumOf(const std::vector<uint32_t>& tokens) {
  return std::accumulate(tokens.begin(), tokens.end(), uint64_t{0});
}

TEST(Spread, TokensGoWhereTheyTakeMostAway) {
  // Losses a / t: the sum is least where t goes with the root of a.
  const std::vector<LossCurve> heads = {Power(1, 1, 100), Power(4, 1, 100), Power(9, 1, 100)};
  const auto tokens = SpreadTokens(heads);
  EXPECT_EQ(SumOf(tokens), 300u);
  EXPECT_NEAR(tokens[0], 50, 4);
  EXPECT_NEAR(tokens[1], 100, 7);
  EXPECT_NEAR(tokens[2], 150, 10);
}

TEST(Spread, HeadsAlikeShareAlike) {
  const std::vector<LossCurve> heads(7, Power(1, 1.3, 90));
  const auto tokens = SpreadTokens(heads);
  EXPECT_EQ(SumOf(tokens), 630u);
  for (const uint32_t t : tokens) EXPECT_NEAR(t, 90, 8);
}

TEST(Spread, BoundsAndWhatIsNotKnown) {
  EXPECT_TRUE(SpreadTokens({}).empty());
  // The first needs nothing, the second everything; of the third nothing is known.
  std::vector<LossCurve> heads = {Power(1e-9, 1, 100), Power(5, 1, 100), {{}, 100}};
  EXPECT_EQ(SpreadTokens(heads), (std::vector<uint32_t>{25, 175, 100}));
  heads = {Power(1e-9, 1, 100), Power(1e-9, 1, 100), Power(1e-9, 1, 100), Power(1e-9, 1, 100),
           Power(5, 1, 100)};
  EXPECT_EQ(SpreadTokens(heads), (std::vector<uint32_t>{25, 25, 25, 25, 400}));
  // Nothing is taken below the least that was measured, nor given beyond the most.
  heads = {Power(1e-9, 1, 40), Power(5, 1, 40)};
  EXPECT_EQ(SpreadTokens(heads), (std::vector<uint32_t>{20, 60}));
  heads = {Power(1e-9, 1, 900), Power(5, 1, 900)};
  EXPECT_EQ(SpreadTokens(heads)[1], 1000u);
  heads = {Power(1e-9, 1, 10), Power(5, 1, 10)};
  EXPECT_EQ(SpreadTokens(heads), (std::vector<uint32_t>{10, 10}));
  // One point tells nothing about more or fewer tokens.
  heads = {{{{50, 1}}, 100}, Power(5, 1, 100)};
  EXPECT_EQ(SpreadTokens(heads), (std::vector<uint32_t>{100, 100}));
  // Where a further token gains nothing, those left are shared.
  heads = {Power(0, 1, 100), Power(0, 1, 100)};
  const auto none = SpreadTokens(heads);
  EXPECT_EQ(SumOf(none), 200u);
  EXPECT_EQ(none[0], none[1]);
}

// Whatever the curves: no more than equal shares, all of it where heads have room, and by the
// curves' own account never worse.
TEST(Spread, NeverReadsMoreThanEqualShares) {
  Random random(testing::Seed("Spread.Never"));
  for (int round = 0; round < 200; ++round) {
    std::vector<LossCurve> heads;
    uint64_t equal = 0;
    for (uint32_t h = 0, n = random.Int(1, 40); h < n; ++h) {
      LossCurve curve{{}, random.Int(0, 300)};
      double tokens = random.Uniform(1, 40);
      for (uint32_t p = random.Int(0, 7); p > 0; --p, tokens *= random.Uniform(1.2, 4)) {
        curve.points.push_back({tokens, random.Chance(0.1) ? 0 : random.Uniform(0, 3)});
      }
      equal += curve.equal;
      heads.push_back(std::move(curve));
    }
    const auto tokens = SpreadTokens(heads);
    ASSERT_EQ(tokens.size(), heads.size());
    EXPECT_EQ(SumOf(tokens), equal);
    for (size_t h = 0; h < heads.size(); ++h) {
      EXPECT_LE(tokens[h], heads[h].equal * kMostSpread);
      EXPECT_GE(tokens[h] * kMostSpread, heads[h].equal);
    }
  }
}

}  // namespace
}  // namespace prefixd
