#include "storage/host_tier.h"

#include <thread>

#include "tests/storage/store_fixture.h"

namespace prefixd::storage {
namespace {

using Page = std::array<std::byte, kPageBytes>;

Page PageOf(const PageKey& key) {
  Page page;
  FillRow(Mix(key.segment) ^ key.page, 0, 0, page);
  return page;
}

bool Holds(HostTier& tier, const PageKey& key, Access access = Access::kPoint) {
  return tier.Lookup(key, access, [&](ConstPageBytes page) {
    const Page expected = PageOf(key);
    EXPECT_EQ(std::memcmp(page.data(), expected.data(), kPageBytes), 0);
  });
}

TEST(HostTier, StaysWithinItsBoundAndNeverMixesPages) {
  std::mt19937_64 rng(Seed("HostTier.StaysWithinItsBound"));
  HostTier tier(300 * kPageBytes + 5);
  const uint64_t capacity = tier.stats().capacity;
  EXPECT_LE(capacity, 300 * kPageBytes);
  EXPECT_GT(capacity, 290 * kPageBytes);
  for (int i = 0; i < 20000; ++i) {
    const PageKey key{rng() % 3, rng() % 400};
    if (!Holds(tier, key)) tier.Insert(key, PageOf(key), Access::kPoint);
    ASSERT_LE(tier.stats().bytes, capacity);
  }
  const HostTier::Stats s = tier.stats();
  EXPECT_EQ(s.bytes, capacity);
  EXPECT_EQ(s.hits + s.misses, 20000u);
  EXPECT_GT(s.hits, 0u);
  tier.EraseSegment(1);
  for (uint64_t p = 0; p < 400; ++p) EXPECT_FALSE(Holds(tier, {1, p}));
  EXPECT_LT(tier.stats().bytes, capacity);
}

TEST(HostTier, AScanOfFarMorePagesLeavesHotOnesInPlace) {
  HostTier tier(64 * kPageBytes);
  for (uint64_t p = 0; p < 40; ++p) tier.Insert({1, p}, PageOf({1, p}), Access::kPoint);
  for (uint64_t p = 0; p < 1000; ++p) {
    if (!Holds(tier, {2, p}, Access::kScan)) tier.Insert({2, p}, PageOf({2, p}), Access::kScan);
  }
  for (uint64_t p = 0; p < 40; ++p) EXPECT_TRUE(Holds(tier, {1, p})) << p;
  // The scan took the free room only, and gives it back first.
  for (uint64_t p = 100; p < 120; ++p) tier.Insert({1, p}, PageOf({1, p}), Access::kPoint);
  for (uint64_t p = 0; p < 40; ++p) EXPECT_TRUE(Holds(tier, {1, p})) << p;
}

TEST(HostTier, PagesUsedAgainOutliveManyUsedOnce) {
  HostTier tier(64 * kPageBytes);
  for (uint64_t p = 0; p < 20; ++p) {
    tier.Insert({1, p}, PageOf({1, p}), Access::kPoint);
    EXPECT_TRUE(Holds(tier, {1, p}));
  }
  for (uint64_t p = 0; p < 500; ++p) tier.Insert({2, p}, PageOf({2, p}), Access::kPoint);
  for (uint64_t p = 0; p < 20; ++p) EXPECT_TRUE(Holds(tier, {1, p})) << p;
}

TEST(HostTier, ZeroCapacityHoldsNothing) {
  HostTier tier(0);
  tier.Insert({1, 1}, PageOf({1, 1}), Access::kPoint);
  EXPECT_FALSE(Holds(tier, {1, 1}));
}

TEST(HostTier, ConcurrentUseKeepsPagesWhole) {
  HostTier tier(200 * kPageBytes);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&tier, t] {
      std::mt19937_64 rng(t);
      for (int i = 0; i < 5000; ++i) {
        const PageKey key{1, rng() % 300};
        if (!Holds(tier, key)) tier.Insert(key, PageOf(key), Access::kPoint);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_LE(tier.stats().bytes, tier.stats().capacity);
}

}  // namespace
}  // namespace prefixd::storage
