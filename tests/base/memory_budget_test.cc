// Tests the budget of memory: what is counted, who gives back, who is refused.
#include "base/memory_budget.h"

#include <deque>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/expect_ok.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

TEST(MemoryBudget, ChargesCountUntilTheyAreReleased) {
  const auto budget = MemoryBudget::Create({.capacity = 1000, .reserve = 100});
  EXPECT_EQ(budget->used(), 100u);
  EXPECT_EQ(budget->used(MemoryKind::kReserve), 100u);
  const MemoryAccount account = budget->Of("a");
  auto charge = account.Take(MemoryKind::kKeys, 400);
  ASSERT_OK(charge);
  EXPECT_EQ(budget->used(MemoryKind::kKeys), 400u);
  MemoryCharge moved = *std::move(charge);
  EXPECT_EQ(charge->bytes(), 0u);  // NOLINT(bugprone-use-after-move): that is what is tested
  ASSERT_OK(moved.Resize(500));
  EXPECT_EQ(budget->used(), 600u);
  ASSERT_OK(moved.Resize(50));
  EXPECT_EQ(budget->used(), 150u);
  moved = account.Charge(MemoryKind::kReads, 2000);  // what exists is counted whatever the bound
  EXPECT_EQ(budget->used(), 2100u);
  EXPECT_EQ(budget->used(MemoryKind::kKeys), 0u);
  moved.Release();
  EXPECT_EQ(budget->used(), 100u);
}

TEST(MemoryBudget, RefusesWithATimeToRetryUnlessItNeverFits) {
  const auto budget = MemoryBudget::Create({.capacity = 1000, .reserve = 100});
  const MemoryAccount account = budget->Shared();
  auto most = account.Take(MemoryKind::kPuts, 700);
  ASSERT_OK(most);
  const auto later = account.Take(MemoryKind::kPuts, 300);
  EXPECT_CODE(later, Code::kResourceExhausted);
  EXPECT_GT(later.error().retry_after_ms, 0u);
  EXPECT_NE(later.error().message.find("store.memory_mib"), std::string::npos);
  const auto never = account.Take(MemoryKind::kPuts, 901);
  EXPECT_CODE(never, Code::kResourceExhausted);
  EXPECT_EQ(never.error().retry_after_ms, 0u);
  EXPECT_EQ(budget->refused(), 2u);
  EXPECT_CODE(most->Resize(901), Code::kResourceExhausted);
  EXPECT_EQ(most->bytes(), 700u);
  EXPECT_FALSE(account.TryTake(MemoryKind::kPuts, 300));
  EXPECT_EQ(budget->refused(), 3u);  // TryTake asks nobody for anything
  EXPECT_TRUE(account.TryTake(MemoryKind::kPuts, 200));
}

TEST(MemoryBudget, OthersGiveBackBeforeAnybodyIsRefused) {
  const auto budget = MemoryBudget::Create({.capacity = 1000});
  const MemoryAccount account = budget->Shared();
  std::deque<MemoryCharge> cache;
  for (int i = 0; i < 9; ++i) cache.push_back(account.Charge(MemoryKind::kHostTier, 100));
  auto giver = budget->OnShortage([&](uint64_t, const std::string* tenant) {
    EXPECT_EQ(tenant, nullptr);
    if (cache.empty()) return false;
    cache.pop_front();
    return true;
  });
  const auto taken = account.Take(MemoryKind::kSummaries, 450);
  ASSERT_OK(taken);
  EXPECT_EQ(cache.size(), 5u);  // as many as needed
  EXPECT_FALSE(account.TryTake(MemoryKind::kKeys, 100));
  EXPECT_EQ(cache.size(), 5u);
  EXPECT_CODE(account.Take(MemoryKind::kSummaries, 600), Code::kResourceExhausted);
  EXPECT_EQ(cache.size(), 0u);
  giver = {};
  cache.push_back(account.Charge(MemoryKind::kHostTier, 500));
  EXPECT_CODE(account.Take(MemoryKind::kSummaries, 100), Code::kResourceExhausted);
  EXPECT_EQ(cache.size(), 1u);  // it has been withdrawn
}

TEST(MemoryBudget, ATenantStaysWithinItsShare) {
  const auto budget = MemoryBudget::Create({.capacity = 1000, .tenant_share = 0.5});
  const MemoryAccount a = budget->Of("a"), b = budget->Of("b");
  const auto held = a.Take(MemoryKind::kSummaries, 400);
  const auto tier = a.Take(MemoryKind::kHostTier, 300);  // has shares of its own
  ASSERT_OK(held);
  ASSERT_OK(tier);
  std::vector<std::string> asked;
  auto giver = budget->OnShortage([&](uint64_t, const std::string* tenant) {
    asked.push_back(tenant ? *tenant : "all");
    return false;
  });
  const auto refused = budget->Of("a").Take(MemoryKind::kSummaries, 101);
  EXPECT_CODE(refused, Code::kResourceExhausted);
  EXPECT_NE(refused.error().message.find("tenant 'a'"), std::string::npos);
  EXPECT_GT(refused.error().retry_after_ms, 0u);
  EXPECT_EQ(asked, std::vector<std::string>{"a"});  // the others need not give anything
  EXPECT_EQ(budget->used(), 700u);
  const auto other = b.Take(MemoryKind::kSummaries, 300);
  ASSERT_OK(other);
  const auto tenants = budget->tenants();
  ASSERT_EQ(tenants.size(), 2u);
  EXPECT_EQ(tenants[0].tenant, "a");
  EXPECT_EQ(tenants[0].bytes, 400u);
  EXPECT_EQ(tenants[0].host_tier, 300u);
  EXPECT_EQ(tenants[0].refused, 1u);
  EXPECT_EQ(tenants[1].bytes, 300u);
}

TEST(MemoryBudget, TenantsThatHoldNothingAreForgotten) {
  const auto budget = MemoryBudget::Create({.capacity = 1000});
  for (int i = 0; i < 100; ++i) ASSERT_OK(budget->Of(std::to_string(i)).Take(MemoryKind::kPuts, 1));
  const MemoryAccount kept = budget->Of("kept");
  EXPECT_EQ(budget->tenants().size(), 1u);
  EXPECT_EQ(budget->used(), 0u);
}

TEST(MemoryBudget, ChargesOutliveEveryHandleOfTheBudget) {
  auto budget = MemoryBudget::Create({.capacity = 1000});
  MemoryCharge charge = budget->Of("a").Charge(MemoryKind::kKeys, 10);
  budget.reset();
  ASSERT_OK(charge.Resize(500));
  EXPECT_CODE(charge.Resize(1001), Code::kResourceExhausted);
}

TEST(MemoryBudget, NeverExceedsItsCapacityFromManyThreads) {
  const auto budget = MemoryBudget::Create({.capacity = 1000});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const MemoryAccount account = budget->Of(std::to_string(t % 2));
      for (int i = 0; i < 20'000; ++i) {
        auto charge = account.TryTake(MemoryKind::kScratch, 100 + i % 300);
        EXPECT_LE(budget->used(), 1000u);
        if (charge) charge->TryResize(500);
        EXPECT_LE(budget->used(), 1000u);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(budget->used(), 0u);
  EXPECT_EQ(budget->used(MemoryKind::kScratch), 0u);
}

TEST(MemoryAccount, ADefaultOneRefusesNothing) {
  const MemoryAccount nobody;
  auto charge = nobody.Take(MemoryKind::kPuts, UINT64_MAX);
  ASSERT_OK(charge);
  ASSERT_OK(charge->Resize(5));
  EXPECT_TRUE(nobody.TryTake(MemoryKind::kPuts, UINT64_MAX));
}

}  // namespace
}  // namespace prefixd
