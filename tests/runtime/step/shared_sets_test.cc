// Tests which set a step uses, how sets widen and age, and what a window hides, against plain
// restatements of [PrHS]
#include "runtime/step/shared_sets.h"

#include <limits>
#include <set>

#include "tests/runtime/step/plain_sharing.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::testing {
namespace {

TEST(SharedSets, FollowTheSpec) {
  Random random(Seed("SharedSetsFollowTheSpec"));
  size_t shared = 0, retrieved = 0;
  for (const uint32_t group : {1u, 3u}) {
    for (const uint32_t block : {1u, 2u, 8u, 16u}) {
      for (const bool across : {false, true}) {
        const StepPolicy::Sharing sharing{block, 0.8, 1, across};
        SharedSets sets(sharing, std::vector<uint32_t>{1, group});
        const auto queries = Wander(random, 100, group * 12);
        const auto want = PlainSharing(queries, group, sharing);
        for (size_t t = 0; t < queries.size(); ++t) {
          const SharedSet set = sets.Find(1, queries[t]);
          if (!set) {
            ASSERT_EQ(want[t], t) << "step " << t << ", block " << block;
            sets.Keep(1, queries[t], {{static_cast<uint32_t>(t)}, {}});
            ++retrieved;
            continue;
          }
          ASSERT_EQ(set->ids.at(0), want[t]) << "step " << t << ", block " << block;
          ++shared;
        }
        EXPECT_EQ(sets.Find(0, queries[0]), nullptr);  // heads share nothing
      }
    }
  }
  EXPECT_GT(shared, 200u);
  EXPECT_GT(retrieved, 200u);
}

TEST(SharedSets, ARetrievalThatFailedIsNoSet) {
  Random random(1);
  SharedSets sets({8, 0.5, 1, true}, std::vector<uint32_t>{1});
  const auto q = random.Normals(8);
  EXPECT_EQ(sets.Find(0, q), nullptr);
  EXPECT_EQ(sets.Find(0, q), nullptr);  // nothing was kept
  sets.Keep(0, q, {{3}, {}});
  ASSERT_TRUE(sets.Find(0, q));
  EXPECT_EQ(sets.Find(0, std::vector<float>(8, 0.0f)), nullptr);  // zeros are like nothing
}

TEST(SharedSets, CutsMoveWithTheSetsScores) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<Cut> cuts = {{-1, CutKind::kExact}, {2, CutKind::kApproximate}, {}};
  const std::vector<float> then = {0, 0, 3, 3, 5, 5};  // [3][2]
  const std::vector<Cut> offsets = MakeCutOffsets(cuts, then);
  ASSERT_EQ(offsets.size(), 3u);
  const std::vector<float> now = {2, 2, 2, 2, 7, 7};
  const std::vector<Cut> moved = CutsFromOffsets(offsets, now);
  ASSERT_EQ(moved.size(), 3u);
  EXPECT_NEAR(moved[0].score, 1, 1e-5);
  EXPECT_NEAR(moved[1].score, 1, 1e-5);
  EXPECT_EQ(moved[0].kind, CutKind::kApproximate);  // no search was made for this query
  EXPECT_EQ(moved[1].kind, CutKind::kApproximate);
  EXPECT_EQ(moved[2].kind, CutKind::kNone);
  // The set is the whole mid region, so nothing lies beyond it.
  const std::vector<Cut> all = MakeCutOffsets(std::vector<Cut>{{-inf, CutKind::kExact}}, now);
  EXPECT_EQ(CutsFromOffsets(all, now)[0].score, -inf);
  EXPECT_EQ(CutsFromOffsets(offsets, {})[0].kind, CutKind::kNone);
}

TEST(SharedSets, DilationIsOfTheBestAndStaysInside) {
  Random random(Seed("Dilation"));
  for (int round = 0; round < 200; ++round) {
    const TokenRange within{random.Int(0, 4), 20 + random.Int(0, 29)};
    std::set<uint32_t> ids;
    for (int i = 0; i < 8; ++i) {
      ids.insert(within.begin + random.Int(0, within.size() - 1));
    }
    std::vector<uint32_t> best;
    for (const uint32_t id : ids) {
      if (random.Chance(0.5)) best.push_back(id);
    }
    const auto reach = random.Int(0, 59);
    std::set<uint32_t> want = ids;
    for (uint32_t t = within.begin; t < within.end; ++t) {
      for (const uint32_t b : best) {
        if (std::abs(int64_t{t} - int64_t{b}) <= reach) want.insert(t);
      }
    }
    const std::vector<uint32_t> all(ids.begin(), ids.end());
    EXPECT_EQ(Dilated(all, best, reach, within), std::vector<uint32_t>(want.begin(), want.end()));
  }
}

}  // namespace
}  // namespace prefixd::testing
