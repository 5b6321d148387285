#include "index/search/recall.h"

#include "index/ranking/group_ranking.h"
#include "tests/index/index_test_support.h"
#include "tests/support/seed.h"

namespace prefixd::index {
namespace {

TEST(Recall, CountsByHand) {
  // Tokens 7 to 10 have the probabilities 4/10, 3/10, 2/10, 1/10.
  const std::vector<float> scores = {std::log(4.0f), std::log(3.0f), std::log(2.0f), 0.0f};
  const std::vector<uint32_t> ids = {7, 9};
  const auto quality = MeasureSelection(scores, 1, 7, ids);
  ASSERT_TRUE(quality.ok());
  EXPECT_NEAR(quality->recall, 0.5, 1e-12);
  EXPECT_NEAR(quality->mass[0], 0.6, 1e-6);
  EXPECT_NEAR(quality->best_mass[0], 0.7, 1e-6);
  EXPECT_NEAR(quality->worst_relative_mass(), 6.0 / 7, 1e-6);
}

TEST(Recall, RanksByTheGroupAndReportsHeadsApart) {
  // Head 0 is sharp on token 0, head 1 on token 2, with far larger raw scores.
  const std::vector<float> scores = {9, 0, 0, 50, 50, 60};
  const std::vector<uint32_t> ids = {0, 2};
  const auto both = MeasureSelection(scores, 2, 0, ids);
  ASSERT_TRUE(both.ok());
  EXPECT_EQ(both->recall, 1.0);
  const std::vector<uint32_t> other = {1, 2};
  const auto one = MeasureSelection(scores, 2, 0, other);
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(one->recall, 0.5);
  EXPECT_LT(one->mass[0], 1e-3);
  EXPECT_GT(one->mass[1], 0.999);
  EXPECT_LT(one->worst_relative_mass(), 1e-3);
}

TEST(Recall, TiesCountAsFoundAndNothingAskedIsFound) {
  const std::vector<float> scores = {1, 1, 1, 0};
  const std::vector<uint32_t> ids = {1, 2}, none;
  EXPECT_EQ(MeasureSelection(scores, 1, 0, ids)->recall, 1.0);
  EXPECT_EQ(MeasureSelection(scores, 1, 0, none)->recall, 1.0);
  EXPECT_EQ(MeasureSelection({}, 3, 0, none)->recall, 1.0);
}

TEST(Recall, AnExactSelectionScoresOne) {
  Random random(prefixd::testing::Seed("AnExactSelectionScoresOne"));
  for (int round = 0; round < 50; ++round) {
    const uint32_t n = Uniform(random, 1, 200), group = Uniform(random, 1, 8);
    const std::vector<float> scores = Normal(random, size_t{group} * n, 3);
    const uint32_t k = Uniform(random, 0, n);
    const Selection selection = SelectByGroupMax(scores, group, n, k, 5, true);
    const auto quality = MeasureSelection(scores, group, 5, selection.ids);
    ASSERT_TRUE(quality.ok());
    // A near-tie may fall the other way in float32.
    EXPECT_GE(quality->recall, k == 0 ? 1.0 : (k - 1.0) / k);
    if (k == n) {
      for (const double mass : quality->mass) EXPECT_NEAR(mass, 1.0, 1e-6);
    }
  }
}

TEST(Recall, BadInputsAreRefused) {
  const std::vector<float> scores = {1, 2, 3};
  const auto refused = [&](std::span<const float> s, uint32_t group, std::vector<uint32_t> ids) {
    const auto quality = MeasureSelection(s, group, 10, ids);
    return !quality.ok() && quality.error().code == Code::kInvalidArgument;
  };
  EXPECT_FALSE(refused(scores, 1, {10, 12}));
  EXPECT_TRUE(refused(scores, 1, {9}));
  EXPECT_TRUE(refused(scores, 1, {13}));
  EXPECT_TRUE(refused(scores, 1, {11, 11}));
  EXPECT_TRUE(refused(scores, 1, {12, 11}));
  EXPECT_TRUE(refused(scores, 2, {10}));
  EXPECT_TRUE(refused(scores, 0, {}));
  const std::vector<float> nan = {1, NAN, 3};
  EXPECT_TRUE(refused(nan, 1, {10}));
}

}  // namespace
}  // namespace prefixd::index
