// Tests what goes first when room is needed: the plan alone, on invented snapshots; and the counts
// of uses that it is based on.
#include "storage/catalog/eviction.h"

#include <map>

#include "storage/catalog/catalog.h"
#include "storage/catalog/prefix_tree.h"
#include "storage/catalog/use_history.h"
#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

SegmentId Id(uint8_t n) {
  SegmentId id;
  id.bytes[0] = n;
  return id;
}

EvictionNode Node(uint8_t n, float heat, uint64_t bytes = 100, const std::string& tenant = "t",
                  uint8_t parent = 0) {
  EvictionNode node;
  node.id = Id(n);
  if (parent != 0) node.parent = Id(parent);
  node.tenant = tenant;
  node.bytes = bytes;
  node.tokens = {0, 100};
  node.heat = heat;
  node.named = true;
  return node;
}

std::vector<uint8_t> Victims(const EvictionPlan& plan) {
  std::vector<uint8_t> out;
  for (const EvictionNode& v : plan.victims()) out.push_back(v.id.bytes[0]);
  return out;
}

using Order = std::vector<uint8_t>;

TEST(EvictionTest, ScoreIsRecentUsesTimesCostPerByteAndFallsWithIdleTime) {
  constexpr int64_t kDay = 24 * 3600 * 1000;
  EXPECT_FLOAT_EQ(DecayedHeat(8, kDay), 4);
  EXPECT_FLOAT_EQ(DecayedHeat(8, 3 * kDay), 1);
  EXPECT_FLOAT_EQ(DecayedHeat(8, -kDay), 8);  // a clock that went back
  EXPECT_DOUBLE_EQ(PrefillCost({0, 1}), 1);
  EXPECT_DOUBLE_EQ(PrefillCost({32768, 32769}), 2);
  EXPECT_DOUBLE_EQ(PrefillCost({0, 1000}) + PrefillCost({1000, 5000}), PrefillCost({0, 5000}));
  EvictionNode early = Node(1, 1), late = Node(2, 1);
  late.tokens = {100000, 100100};
  EXPECT_GT(late.score(), early.score());
  EvictionNode large = Node(3, 1, 200);
  EXPECT_LT(large.score(), early.score());
  // Four times as long without a use is a sixteenth of the score, of seconds as of days.
  EXPECT_NEAR(EvictionScore(1, 370'000, {0, 100}, 100) / EvictionScore(1, 70'000, {0, 100}, 100),
              1.0 / 16, 1e-9);
  EXPECT_NEAR(
      EvictionScore(16, 40 * kDay, {0, 100}, 100) / EvictionScore(1, 10 * kDay, {0, 100}, 100), 1,
      1e-3);
  EXPECT_EQ(EvictionScore(1, -5000, {0, 100}, 100), EvictionScore(1, 0, {0, 100}, 100));
}

// What a long chat left an hour ago goes before what a short one left a minute ago, however many
// turns it had.
TEST(EvictionTest, WhatIsNotUsedGoesBeforeWhatIs) {
  std::vector<EvictionNode> nodes{Node(1, 20), Node(2, 1)};
  nodes[0].idle_ms = 3'600'000;
  nodes[1].idle_ms = 60'000;
  EvictionPlan plan(nodes);
  ASSERT_TRUE(plan.Free(100, nullptr));
  EXPECT_EQ(Victims(plan), (Order{1}));
}

TEST(EvictionTest, TheLowestScoreGoesFirstAndNoMoreThanNeeded) {
  EvictionPlan plan({Node(1, 3), Node(2, 1), Node(3, 2)});
  ASSERT_TRUE(plan.Free(150, nullptr));
  EXPECT_EQ(Victims(plan), (Order{2, 3}));
  EXPECT_EQ(plan.freed(), 200u);
  ASSERT_TRUE(plan.Free(100, nullptr));
  EXPECT_EQ(plan.freed(), 300u);
  EXPECT_FALSE(plan.Free(1, nullptr));
}

TEST(EvictionTest, QuarantinedAndExpiredGoFirstAndHeldNever) {
  std::vector<EvictionNode> nodes{Node(1, 1), Node(2, 9), Node(3, 0.1f)};
  nodes[1].useless = true;
  nodes[2].held = true;
  EvictionPlan plan(nodes);
  ASSERT_TRUE(plan.Free(200, nullptr));
  EXPECT_EQ(Victims(plan), (Order{2, 1}));
  EXPECT_FALSE(plan.Free(1, nullptr));
}

TEST(EvictionTest, OnlyLeavesGoAndUnnamedParentsFollow) {
  // The tree is 1 <- 2 <- 3, and 1 <- 4: the parents score little.
  std::vector<EvictionNode> nodes{Node(1, 0.1f), Node(2, 0.2f, 100, "t", 1),
                                  Node(3, 5, 100, "t", 2), Node(4, 7, 100, "t", 1)};
  nodes[1].named = false;
  EvictionPlan plan(nodes);
  ASSERT_TRUE(plan.Free(100, nullptr));
  EXPECT_EQ(Victims(plan), (Order{3}));
  EXPECT_EQ(plan.freed(), 200u);  // 2 goes with it; 1 is continued by 4
  ASSERT_TRUE(plan.Free(150, nullptr));
  EXPECT_EQ(Victims(plan), (Order{3, 4, 1}));
  // An open parent stays, named or not.
  nodes[1].held = true;
  EvictionPlan held(nodes);
  EXPECT_FALSE(held.Free(1000, nullptr));
  EXPECT_EQ(Victims(held), (Order{3, 4}));
}

TEST(EvictionTest, ATenantGivesOnlyItsOwn) {
  const std::string a = "a", nobody = "nobody";
  EvictionPlan plan({Node(1, 5, 100, "a"), Node(2, 1, 100, "b"), Node(3, 4, 100, "a")});
  ASSERT_TRUE(plan.Free(150, &a));
  EXPECT_EQ(Victims(plan), (Order{3, 1}));
  EXPECT_FALSE(plan.Free(1, &a));
  EXPECT_FALSE(plan.Free(1, &nobody));
  EXPECT_TRUE(plan.Free(1, nullptr));
}

TEST(EvictionTest, TenantsOverTheirShareGiveFirst) {
  // Tenant b floods; tenant a's data is older and scores less.
  std::vector<EvictionNode> nodes{Node(1, 0.1f, 100, "a"), Node(2, 1, 100, "b"),
                                  Node(3, 2, 100, "b"), Node(4, 3, 100, "b")};
  EvictionPlan plan(nodes);
  ASSERT_TRUE(plan.Free(200, nullptr));
  EXPECT_EQ(Victims(plan), (Order{2, 3}));
  ASSERT_TRUE(plan.Free(100, nullptr));  // now they are equal, and score decides
  EXPECT_EQ(Victims(plan), (Order{2, 3, 1}));
}

// A root has two children, each used once (its put) at kStart.
class UseCountTest : public ::testing::Test {
 protected:
  static constexpr int64_t kStart = 1'700'000'000'000, kDay = 24 * 3600 * 1000;
  static constexpr int64_t kStep = 60'000;

  static CatalogSegment Segment(uint8_t n, uint8_t parent, TokenRange tokens) {
    CatalogSegment s;
    s.record.id = Id(n);
    s.record.file = s.record.id.bytes;
    s.record.model = "m";
    s.record.tenant = "t";
    if (parent != 0) s.record.parent = Id(parent);
    s.record.tokens = tokens;
    s.record.file_bytes = 4096;
    s.record.created_unix_ms = kStart;
    s.last_used_unix_ms = kStart;
    return s;
  }
  UseCountTest() {
    tree_.Insert({Segment(1, 0, {0, 100})});
    tree_.Insert({Segment(2, 1, {100, 200})});
    tree_.Insert({Segment(3, 1, {100, 150})});
  }
  std::map<uint8_t, float> Heat(int64_t now) const {
    std::map<uint8_t, float> heat;
    for (const EvictionNode& node : tree_.EvictionNodes(now)) heat[node.id.bytes[0]] = node.heat;
    return heat;
  }
  using Heats = std::map<uint8_t, float>;

  PrefixTree tree_;
};

TEST_F(UseCountTest, IdleTimeIsSinceTheLastUseOfTheChain) {
  tree_.Touch(Id(2), kStart + 60'000, kStep);
  std::map<uint8_t, int64_t> idle;
  for (const EvictionNode& n : tree_.EvictionNodes(kStart + 90'000))
    idle[n.id.bytes[0]] = n.idle_ms;
  EXPECT_EQ(idle, (std::map<uint8_t, int64_t>{{1, 30'000}, {2, 30'000}, {3, 90'000}}));
}

TEST_F(UseCountTest, AUseCountsForAllOfTheChainAndHalvesInADay) {
  EXPECT_EQ(Heat(kStart), (Heats{{1, 1}, {2, 1}, {3, 1}}));
  tree_.Touch(Id(2), kStart, kStep);
  tree_.Touch(Id(2), kStart, kStep);
  tree_.Touch(Id(1), kStart, kStep);
  EXPECT_EQ(Heat(kStart), (Heats{{1, 4}, {2, 3}, {3, 1}}));
  EXPECT_EQ(Heat(kStart + kDay), (Heats{{1, 2}, {2, 1.5}, {3, 0.5}}));
  tree_.Touch(Id(3), kStart + kDay, kStep);
  EXPECT_EQ(Heat(kStart + kDay), (Heats{{1, 3}, {2, 1.5}, {3, 1.5}}));
  tree_.Touch(Id(9), kStart, kStep);  // an unknown segment: nothing happens
  EXPECT_EQ(Heat(kStart + kDay), (Heats{{1, 3}, {2, 1.5}, {3, 1.5}}));
}

TEST_F(UseCountTest, WhatComesBackWasUsedBefore) {
  const auto erase = [&](uint8_t n) { ASSERT_OK(tree_.Erase(Id(n), [] { return Status(); })); };
  const auto with_lead = [](uint8_t n, uint8_t parent, TokenRange tokens, uint32_t token) {
    CatalogSegment s = Segment(n, parent, tokens);
    s.record.first_token = token;
    if (parent == 0) s.record.lead = {token, 2, 3};
    return s;
  };
  tree_.Insert({with_lead(11, 0, {0, 100}, 7)});
  tree_.Insert({with_lead(12, 11, {100, 200}, 8)});
  for (int i = 0; i < 3; ++i) tree_.Touch(Id(12), kStart, kStep);
  erase(12);
  erase(11);
  // The same tokens under other ids, in another order, and others beside them.
  tree_.Insert({with_lead(21, 0, {0, 100}, 9)});
  tree_.Insert({with_lead(22, 0, {0, 90}, 7)});
  tree_.Insert({with_lead(23, 22, {100, 150}, 9)});
  CatalogSegment later = with_lead(24, 22, {100, 150}, 8);
  later.last_used_unix_ms = kStart + kDay;
  tree_.Insert({later});
  const Heats heat = Heat(kStart);
  EXPECT_EQ(heat.at(21), 1);
  EXPECT_EQ(heat.at(22), 1 + 4);
  EXPECT_EQ(heat.at(23), 1);
  EXPECT_EQ(Heat(kStart + kDay).at(24), 1 + 2);  // half of four
  erase(23);
  erase(24);
  erase(22);
  tree_.Insert({with_lead(32, 0, {0, 90}, 7)});
  EXPECT_EQ(Heat(kStart).at(32), 1 + 5);  // once: it had been taken out
}

TEST_F(UseCountTest, OfASetOfTheHistoryTheLeastUsedGiveWay) {
  UseHistory history;
  const auto key = [](uint64_t n) { return 5 + n * UseHistory::kSets; };
  for (uint64_t n = 0; n < UseHistory::kWays; ++n) {
    history.Remember(key(n), {float(2 + n), kStart});
  }
  history.Remember(key(100), {1, kStart});  // less than each of them
  EXPECT_FALSE(history.Recall(key(100)));
  history.Remember(key(100), {2.5f, kStart});  // more than one of them
  EXPECT_FALSE(history.Recall(key(0)));
  history.Remember(key(101), {2.4f, kStart + 2 * kDay});  // uses of old count a quarter
  EXPECT_FALSE(history.Recall(key(100)));
  EXPECT_EQ(history.Recall(key(101)).value().heat, 2.4f);
  EXPECT_FALSE(history.Recall(key(101)));
  for (uint64_t n = 1; n < UseHistory::kWays; ++n) {
    EXPECT_EQ(history.Recall(key(n)).value().heat, float(2 + n));
  }
}

TEST_F(UseCountTest, AClockThatWasAheadIsForgotten) {
  tree_.Touch(Id(2), kStart + 365 * kDay, kStep);
  const auto idle = [&](int64_t now) {
    std::map<uint8_t, int64_t> out;
    for (const EvictionNode& n : tree_.EvictionNodes(now)) out[n.id.bytes[0]] = n.idle_ms;
    return out;
  };
  EXPECT_EQ(idle(kStart + kDay)[2], 364 * kDay);
  EXPECT_EQ(tree_.Touch(Id(2), kStart + kDay, kStep).size(), 2u);  // worth writing down
  EXPECT_EQ(idle(kStart + kDay + 5)[2], 5);
}

TEST_F(UseCountTest, UsesAreWrittenDownNowAndThenAndAsTheyAre) {
  const auto touched = [&](uint8_t n, int64_t at) {
    std::map<uint8_t, float> out;
    for (const auto& use : tree_.Touch(Id(n), at, kStep)) out[use.id.bytes[0]] = use.heat;
    return out;
  };
  EXPECT_EQ(touched(2, kStart + kStep - 1), Heats{});
  const Heats due = touched(2, kStart + kStep);
  ASSERT_EQ(due.size(), 2u);  // the chain, not the sibling
  EXPECT_NEAR(due.at(1), 3, 0.01);
  EXPECT_NEAR(due.at(2), 3, 0.01);
  EXPECT_EQ(touched(2, kStart + kStep + 1), Heats{});
  EXPECT_EQ(touched(3, kStart + kStep + 1).size(), 1u);  // the root was just written
}

TEST_F(UseCountTest, TheCatalogKeepsThem) {
  const TempDir dir;
  const CatalogMeta fresh{kStoreFormatVersion, 16, {}};
  {
    const auto catalog = Catalog::Open(dir.path() / "catalog", fresh);
    ASSERT_OK(catalog);
    CatalogChange change;
    change.put.push_back({Segment(1, 0, {0, 100}).record, std::nullopt});
    change.put.push_back({Segment(2, 0, {0, 100}).record, std::nullopt});
    ASSERT_OK((*catalog)->Apply(change));
    ASSERT_OK((*catalog)->SetLastUsed(Id(1), kStart + kDay, 3.5f));
  }
  const auto catalog = Catalog::Open(dir.path() / "catalog", fresh);
  ASSERT_OK(catalog);
  const auto segments = (*catalog)->LoadSegments();
  ASSERT_OK(segments);
  ASSERT_EQ(segments->size(), 2u);
  for (const CatalogSegment& s : *segments) {
    const bool used = s.record.id == Id(1);
    EXPECT_EQ(s.heat, used ? 3.5f : 1.0f);
    EXPECT_EQ(s.last_used_unix_ms, used ? kStart + kDay : kStart);
  }
}

}  // namespace
}  // namespace prefixd::storage
