// The three rules against plain restatements of spec §2 and §4.
#include "index/ranking/group_rules.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "index/ranking/group_ranking.h"
#include "prefixd/selection.h"
#include "tests/support/random_kv.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr GroupRule kRules[] = {GroupRule::kMax, GroupRule::kSum, GroupRule::kUnion};

std::vector<double> Probabilities(const std::vector<float>& scores, uint32_t g, uint32_t n) {
  std::vector<double> p(n);
  double sum = 0;
  for (uint32_t i = 0; i < n; ++i) sum += p[i] = std::exp(double{scores[size_t{g} * n + i]});
  for (double& x : p) x /= sum;
  return p;
}

// The place of token i among head g's, from 0 on.
uint32_t Place(const std::vector<float>& scores, uint32_t g, uint32_t n, uint32_t i) {
  const float* row = scores.data() + size_t{g} * n;
  uint32_t place = 0;
  for (uint32_t j = 0; j < n; ++j) place += row[j] > row[i] || (row[j] == row[i] && j < i);
  return place;
}

TEST(GroupRules, MatchTheSpecAndTheirCutsHold) {
  testing::Random random(testing::Seed("GroupRules"));
  for (int round = 0; round < 200; ++round) {
    const uint32_t group = random.Int(1, 6), n = random.Int(2, 150), k = random.Int(0, n - 1);
    const std::vector<float> scores =
        random.Normals(size_t{group} * n, static_cast<float>(random.Uniform(0.1, 6)), 1);
    std::vector<std::vector<double>> p;
    for (uint32_t g = 0; g < group; ++g) p.push_back(Probabilities(scores, g, n));
    for (const GroupRule rule : kRules) {
      const Selection s = SelectByGroup(rule, scores, group, n, k, 7, true);
      ASSERT_EQ(s.ids.size(), k);
      ASSERT_TRUE(std::is_sorted(s.ids.begin(), s.ids.end()));
      std::vector<double> rank(n);
      for (uint32_t i = 0; i < n; ++i) {
        double best = 0, sum = 0;
        uint32_t place = n;
        for (uint32_t g = 0; g < group; ++g) {
          best = std::max(best, p[g][i]), sum += p[g][i];
          place = std::min(place, Place(scores, g, n, i));
        }
        rank[i] = rule == GroupRule::kMax   ? std::log(best)
                  : rule == GroupRule::kSum ? std::log(sum)
                                            : -double(place);
      }
      const std::set<uint32_t> taken(s.ids.begin(), s.ids.end());
      double worst_in = 1e300, best_out = -1e300;
      for (uint32_t i = 0; i < n; ++i) {
        if (taken.contains(7 + i)) worst_in = std::min(worst_in, rank[i]);
        if (!taken.contains(7 + i)) best_out = std::max(best_out, rank[i]);
      }
      ASSERT_GE(worst_in, best_out - 1e-5) << GroupRuleName(rule);
      ASSERT_EQ(s.cuts.size(), group);
      for (uint32_t g = 0; g < group; ++g) {
        ASSERT_EQ(s.cuts[g].kind, CutKind::kExact);
        float highest = -kInf;
        for (uint32_t i = 0; i < n; ++i) {
          if (!taken.contains(7 + i)) highest = std::max(highest, scores[size_t{g} * n + i]);
        }
        ASSERT_LE(highest, s.cuts[g].score) << "an unread token above an exact cut";
        if (rule == GroupRule::kUnion) {
          ASSERT_EQ(s.cuts[g].score, highest);
        }
      }
    }
  }
}

// A head that attends broadly has no say by max or sum, and its share by union.
TEST(GroupRules, UnionServesEveryHeadAlike) {
  constexpr uint32_t kN = 100;
  std::vector<float> scores(2 * kN);
  for (uint32_t i = 0; i < 10; ++i) scores[i] = 20 - 0.1f * float(i);    // sharp
  for (uint32_t i = 50; i < 60; ++i) scores[kN + i] = 0.01f * float(i);  // nearly flat
  const auto by = [&](GroupRule rule) {
    return SelectByGroup(rule, scores, 2, kN, 10, 0, true).ids;
  };
  EXPECT_EQ(by(GroupRule::kMax), (std::vector<uint32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(by(GroupRule::kSum), (std::vector<uint32_t>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(by(GroupRule::kUnion), (std::vector<uint32_t>{0, 1, 2, 3, 4, 55, 56, 57, 58, 59}));
}

// Every head's best token ranks alike: of more of them than are wanted the last stay out.
TEST(GroupRules, UnionOfFewerTokensThanHeads) {
  constexpr uint32_t kMany = 1000, kHeads = 4;
  std::vector<float> scores(kHeads * kMany);
  for (uint32_t i = 0; i < kMany; ++i) {
    for (uint32_t g = 0; g < kHeads; ++g) scores[g * kMany + i] = -1e-3f * float(i);
  }
  for (uint32_t g = 0; g < kHeads; ++g) scores[g * kMany + 100 * (g + 1)] = 5;
  for (uint32_t k = 1; k <= 6; ++k) {
    const auto ids = SelectByGroup(GroupRule::kUnion, scores, kHeads, kMany, k, 0, true).ids;
    ASSERT_EQ(ids.size(), k);
    EXPECT_EQ(std::ranges::count_if(ids, [](uint32_t id) { return id > 0 && id % 100 == 0; }),
              std::min(k, kHeads));
  }
}

TEST(GroupRules, OfOneHeadAllAreTopK) {
  testing::Random random(testing::Seed("GroupRulesOneHead"));
  const auto scores = random.Normals(500, 3, 0);
  const Selection want = SelectByGroupMax(scores, 1, 500, 40, 0, true);
  for (const GroupRule rule : kRules) {
    EXPECT_EQ(SelectByGroup(rule, scores, 1, 500, 40, 0, true).ids, want.ids);
  }
}

TEST(GroupRules, ExtremesAndTies) {
  for (const GroupRule rule : kRules) {
    SCOPED_TRACE(GroupRuleName(rule));
    // Equal ranks: the lowest first.
    const std::vector<float> flat(2 * 10, 1.5f);
    EXPECT_EQ(SelectByGroup(rule, flat, 2, 10, 4, 100, true).ids,
              (std::vector<uint32_t>{100, 101, 102, 103}));
    // Everything, nothing, and no candidates.
    EXPECT_EQ(SelectByGroup(rule, flat, 2, 10, 10, 0, true).cuts[1].score, -kInf);
    EXPECT_TRUE(SelectByGroup(rule, flat, 2, 10, 0, 0, true).ids.empty());
    EXPECT_TRUE(SelectByGroup(rule, {}, 2, 0, 4, 0, true).ids.empty());
    // Far below what exp can say: a cut still bounds them.
    std::vector<float> far(10, -500.0f);
    far[3] = 0;
    const Selection s = SelectByGroup(rule, far, 1, 10, 1, 0, true);
    EXPECT_EQ(s.ids, (std::vector<uint32_t>{3}));
    EXPECT_GE(s.cuts[0].score, -500.0f);
    EXPECT_LT(s.cuts[0].score, -50.0f);
    EXPECT_EQ(SelectByGroup(rule, far, 1, 10, 1, 0, false).cuts[0].kind, CutKind::kApproximate);
    // Bad scores are selected, so that the step can name the row.
    far[7] = std::numeric_limits<float>::quiet_NaN();
    const auto ids = SelectByGroup(rule, far, 1, 10, 2, 0, true).ids;
    EXPECT_EQ(ids, (std::vector<uint32_t>{3, 7}));
  }
}

TEST(GroupRules, HaveNames) {
  for (const GroupRule rule : kRules) {
    const auto parsed = GroupRuleFromName(GroupRuleName(rule));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(*parsed, rule);
  }
  EXPECT_FALSE(GroupRuleFromName("median").ok());
}

}  // namespace
}  // namespace prefixd
