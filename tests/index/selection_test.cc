#include "prefixd/selection.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "index/ranking/group_ranking.h"
#include "tests/support/infinity.h"
#include "tests/support/random_kv.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::kInf;

double LogSumExp(const float* s, uint32_t n) {
  const double max = *std::max_element(s, s + n);
  double sum = 0;
  for (uint32_t i = 0; i < n; ++i) sum += std::exp(s[i] - max);
  return max + std::log(sum);
}

TEST(SelectByGroupMax, MatchesSortingAndItsCutsHold) {
  testing::Random random(testing::Seed("SelectByGroupMax"));
  for (int round = 0; round < 300; ++round) {
    const uint32_t group = random.Int(1, 8), n = random.Int(1, 400), k = random.Int(0, n);
    const uint32_t first = random.Int(0, 1000);
    const std::vector<float> scores =
        random.Normals(size_t{group} * n, static_cast<float>(random.Uniform(0.1, 15)), 3);
    const Selection s = SelectByGroupMax(scores, group, n, k, first, true);
    ASSERT_EQ(s.ids.size(), k);
    ASSERT_EQ(s.cuts.size(), group);
    ASSERT_TRUE(std::is_sorted(s.ids.begin(), s.ids.end()));
    std::vector<bool> taken(n);
    for (uint32_t id : s.ids) taken[id - first] = true;

    std::vector<double> rank(n, -1e300);
    for (uint32_t g = 0; g < group; ++g) {
      const double lse = LogSumExp(scores.data() + size_t{g} * n, n);
      for (uint32_t i = 0; i < n; ++i) {
        rank[i] = std::max(rank[i], scores[size_t{g} * n + i] - lse);
      }
    }
    double worst_in = 1e300, best_out = -1e300;
    for (uint32_t i = 0; i < n; ++i) {
      if (taken[i]) worst_in = std::min(worst_in, rank[i]);
      if (!taken[i]) best_out = std::max(best_out, rank[i]);
    }
    ASSERT_GE(worst_in, best_out - 1e-5);
    for (uint32_t g = 0; g < group; ++g) {
      ASSERT_EQ(s.cuts[g].kind, CutKind::kExact);
      if (k == n) {
        ASSERT_EQ(s.cuts[g].score, -kInf);
        continue;
      }
      const float* row = scores.data() + size_t{g} * n;
      ASSERT_NEAR(s.cuts[g].score, LogSumExp(row, n) + best_out, 2e-5 * (1 + std::abs(best_out)));
      for (uint32_t i = 0; i < n; ++i) {
        if (!taken[i]) {
          ASSERT_LE(row[i], s.cuts[g].score) << "an unread token above an exact cut";
        }
      }
    }
  }
}

TEST(SelectByGroupMax, TiesGoToTheLowestIds) {
  const std::vector<float> scores(20, 1.5f);
  const Selection s = SelectByGroupMax(scores, 2, 10, 4, 100, true);
  EXPECT_EQ(s.ids, (std::vector<uint32_t>{100, 101, 102, 103}));
}

TEST(SelectByGroupMax, EveryHeadOfTheGroupIsServed) {
  // Head 1's scores are far larger, but head 0's best token is as good relative to its own mass.
  std::vector<float> scores(20, 0.0f);
  scores[3] = 10;
  for (int i = 10; i < 20; ++i) scores[i] = 500;
  scores[17] = 510;
  EXPECT_EQ(SelectByGroupMax(scores, 2, 10, 2, 0, true).ids, (std::vector<uint32_t>{3, 7}));
}

TEST(SelectByGroupMax, EmptyAndWholeSets) {
  const std::vector<float> scores = {1, 2, 3};
  const Selection none = SelectByGroupMax(scores, 1, 3, 0, 0, true);
  EXPECT_TRUE(none.ids.empty());
  EXPECT_NEAR(none.cuts[0].score, 3, 1e-5);
  EXPECT_GE(none.cuts[0].score, 3);
  const Selection all = SelectByGroupMax(scores, 1, 3, 9, 5, true);
  EXPECT_EQ(all.ids, (std::vector<uint32_t>{5, 6, 7}));
  EXPECT_EQ(all.cuts[0].score, -kInf);
  const Selection nothing = SelectByGroupMax({}, 2, 0, 4, 0, true);
  EXPECT_TRUE(nothing.ids.empty());
  EXPECT_EQ(nothing.cuts.size(), 2u);
}

TEST(SelectByGroupMax, OneRankingServesEveryK) {
  testing::Random random(testing::Seed("RankByGroupMax"));
  for (int round = 0; round < 100; ++round) {
    const uint32_t group = random.Int(1, 5), n = random.Int(1, 200), most = random.Int(0, n);
    std::vector<float> scores = random.Normals(size_t{group} * n, 2.0f);
    for (float& s : scores) s = std::round(4 * s) / 4;  // ties
    const GroupRanking ranking = RankByGroupMax(scores, group, n, most);
    for (uint32_t k = 0; k <= most; ++k) {
      const Selection want = SelectByGroupMax(scores, group, n, k, 0, true);
      std::vector<uint32_t> ids(ranking.best.begin(), ranking.best.begin() + k);
      std::sort(ids.begin(), ids.end());
      ASSERT_EQ(ids, want.ids);
      const std::vector<Cut> cuts = ranking.Cuts(k);
      for (uint32_t g = 0; g < group; ++g) {
        ASSERT_EQ(cuts[g].score, want.cuts[g].score);
        ASSERT_EQ(cuts[g].kind, want.cuts[g].kind);
      }
    }
  }
}

// The scores of a subset, ranked by the log-sum-exp of all candidates, select as all scores would.
TEST(SelectByGroupMax, OfASubsetItRanksByTheLogSumExpOfAll) {
  testing::Random random(testing::Seed("SelectByGroupMaxSubset"));
  for (int round = 0; round < 50; ++round) {
    const uint32_t group = random.Int(1, 5), n = random.Int(2, 300), k = random.Int(1, n - 1);
    const std::vector<float> scores = random.Normals(size_t{group} * n, 3.0f);
    const Selection all = SelectByGroupMax(scores, group, n, k, 0, true);
    std::vector<double> lse(group);
    std::vector<uint32_t> subset = all.ids;
    for (uint32_t i = 0; i < n; i += 3) subset.push_back(i);
    std::sort(subset.begin(), subset.end());
    subset.erase(std::unique(subset.begin(), subset.end()), subset.end());
    const auto m = static_cast<uint32_t>(subset.size());
    std::vector<float> some;
    for (uint32_t g = 0; g < group; ++g) {
      double sum = 0;
      for (uint32_t i = 0; i < n; ++i) sum += std::exp(double{scores[g * n + i]});
      lse[g] = std::log(sum);
      for (const uint32_t i : subset) some.push_back(scores[g * n + i]);
    }
    Selection got = SelectByGroupMax(some, group, m, k, 0, false, lse);
    for (uint32_t& id : got.ids) id = subset[id];
    ASSERT_EQ(got.ids, all.ids);
    if (m == k) continue;  // the whole subset: the others' ranks are unknown
    for (uint32_t g = 0; g < group; ++g) {
      EXPECT_EQ(got.cuts[g].kind, CutKind::kApproximate);
      for (uint32_t j = 0; j < m; ++j) {
        if (std::binary_search(all.ids.begin(), all.ids.end(), subset[j])) continue;
        EXPECT_LE(some[size_t{g} * m + j], got.cuts[g].score);
      }
    }
  }
}

TEST(SelectByGroupMax, IncompleteScoresGiveNoExactCut) {
  const std::vector<float> scores = {1, 2, 3, 4};
  EXPECT_EQ(SelectByGroupMax(scores, 1, 4, 2, 0, false).cuts[0].kind, CutKind::kApproximate);
  const Selection all = SelectByGroupMax(scores, 1, 4, 4, 0, false);
  EXPECT_EQ(all.cuts[0].kind, CutKind::kNone);
  EXPECT_EQ(all.cuts[0].score, kInf);
}

TEST(SelectByGroupMax, BadScoresAreSelectedSoThatTheStepCanNameThem) {
  std::vector<float> scores = {5, 1, std::nanf(""), 2, -kInf, 3};
  const Selection s = SelectByGroupMax(scores, 1, 6, 2, 0, true);
  EXPECT_EQ(s.ids, (std::vector<uint32_t>{0, 2}));
  EXPECT_FALSE(std::isnan(s.cuts[0].score));
  const std::vector<float> all_bad(6, std::nanf(""));
  EXPECT_EQ(SelectByGroupMax(all_bad, 1, 6, 2, 0, true).ids.size(), 2u);
}

}  // namespace
}  // namespace prefixd
