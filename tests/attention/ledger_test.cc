#include "prefixd/ledger.h"

#include <cmath>

#include "attention/step/budget.h"
#include "prefixd/estimator_variant.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

constexpr RowShape kRow128{128, 128, DType::kBf16};
constexpr RowShape kRow64{64, 64, DType::kBf16};

TEST(Tokens, PhiCacheAsInTheSpec) {
  EXPECT_EQ(std::ceil(PhiTokens(kRow128, 128, 2)), 65);
  EXPECT_EQ(std::ceil(PhiTokens(kRow64, 64, 2)), 33);
  EXPECT_EQ(PhiTokens(kRow128, 128, 4), 130);
  EXPECT_EQ(PhiTokens(kRow64, 64, 4), 66);
}

TEST(Tokens, MomentSummariesAsInTheSpec) {
  EXPECT_EQ(MomentTokens(kRow64, 0, 2), 1.5);
  EXPECT_EQ(MomentTokens(kRow64, 8, 2), 9.5);
  EXPECT_EQ(MomentTokens(kRow64, 64, 2), 33.5);  // all of C
  EXPECT_EQ(MomentTokens(kRow64, 0, 4), 3.0);    // float32 beside bf16 rows counts double
}

TEST(PlanBudget, CheckValuesOfTheSpec) {
  const Result<BudgetPlan> topk = PlanBudget(16384, {}, 0.01, 0);
  ASSERT_TRUE(topk.ok());
  EXPECT_EQ(topk->total_tokens, 164u);
  EXPECT_EQ(topk->anchor_tokens, 20u);
  EXPECT_EQ(topk->k, 144u);
  EXPECT_EQ(PlanBudget(16384, {}, 0.01, PhiTokens(kRow128, 128, 2))->k, 79u);
  EXPECT_EQ(PlanBudget(16384, {}, 0.01, PhiTokens(kRow128, 128, 4))->k, 14u);
  // Amortised over 65 tokens the bf16 cache costs one token a step.
  EXPECT_EQ(PlanBudget(16384, {}, 0.01, PhiTokens(kRow128, 128, 2), 65)->k, 143u);
}

TEST(PlanBudget, RoundsTheFractionUpButNotForFloatingPointNoise) {
  EXPECT_EQ(PlanBudget(100, {1, 1}, 0.07, 0)->total_tokens, 7u);
  EXPECT_EQ(PlanBudget(101, {1, 1}, 0.07, 0)->total_tokens, 8u);
  EXPECT_EQ(PlanBudget(1000, {1, 1}, 1.0, 0)->k, 998u);
}

TEST(PlanBudget, InfeasibleIsSaidNeverSilent) {
  const Result<BudgetPlan> plan = PlanBudget(1000, {}, 0.01, 0);
  ASSERT_FALSE(plan.ok());
  EXPECT_EQ(plan.error().code, Code::kInfeasible);
  EXPECT_FALSE(PlanBudget(8192, {}, 0.01, 66).ok());
  EXPECT_TRUE(PlanBudget(2000, {}, 0.01, 0).ok());  // exactly the anchors
  EXPECT_EQ(PlanBudget(2000, {}, 0.01, 0)->k, 0u);
}

TEST(PlanBudget, ShortPrefixesNeverRetrieveMoreThanTheirMid) {
  for (uint32_t n = 1; n < 60; ++n) {
    const Result<BudgetPlan> plan = PlanBudget(n, {}, 1.0, 0);
    ASSERT_TRUE(plan.ok()) << n;
    EXPECT_EQ(plan->k, n > 20 ? n - 20 : 0) << n;
  }
}

TEST(PlanBudget, RefusesNonsense) {
  for (double fraction : {0.0, -0.1, 1.5, std::nan("")}) {
    const Result<BudgetPlan> plan = PlanBudget(1000, {}, fraction, 0);
    ASSERT_FALSE(plan.ok());
    EXPECT_EQ(plan.error().code, Code::kInvalidArgument);
  }
  EXPECT_EQ(PlanBudget(1000, {}, 0.5, -1).error().code, Code::kInvalidArgument);
  EXPECT_EQ(PlanBudget(1000, {}, 0.5, 0, 0).error().code, Code::kInvalidArgument);
}

TEST(EstimatorKind, NamesRoundTrip) {
  for (EstimatorKind kind :
       {EstimatorKind::kNone, EstimatorKind::kPhi, EstimatorKind::kMoment, EstimatorKind::kAuto}) {
    ASSERT_TRUE(EstimatorFromName(EstimatorName(kind)).ok());
    EXPECT_EQ(*EstimatorFromName(EstimatorName(kind)), kind);
  }
  EXPECT_FALSE(EstimatorFromName("magic").ok());
}

TEST(Ledger, AddsEveryField) {
  Ledger a;
  a.steps = 1, a.anchor_tokens = 2, a.retrieved_tokens = 3, a.summary_tokens = 4.5;
  a.logical_bytes = 5, a.physical_bytes = {6, 7, 8}, a.keys_scanned = 9, a.scan_bytes = 10;
  a.selections = 13, a.retrievals = 11, a.rho_z_sum = 0.5, a.rho_z_count = 2;
  a.ahead_bytes = 15, a.ahead_used_bytes = 16;
  a.select_ns = 12, a.read_ns = 13, a.compute_ns = 14;
  Ledger b = a;
  b += a;
  b += Ledger{};
  EXPECT_EQ(b.steps, 2u);
  EXPECT_EQ(b.anchor_tokens, 4u);
  EXPECT_EQ(b.retrieved_tokens, 6u);
  EXPECT_EQ(b.summary_tokens, 9.0);
  EXPECT_EQ(b.logical_bytes, 10u);
  EXPECT_EQ(b.physical_bytes[0], 12u);
  EXPECT_EQ(b.physical_bytes[1], 14u);
  EXPECT_EQ(b.physical_bytes[2], 16u);
  EXPECT_EQ(b.ahead_bytes, 30u);
  EXPECT_EQ(b.ahead_used_bytes, 32u);
  EXPECT_EQ(b.keys_scanned, 18u);
  EXPECT_EQ(b.scan_bytes, 20u);
  EXPECT_EQ(b.selections, 26u);
  EXPECT_EQ(b.retrievals, 22u);
  EXPECT_DOUBLE_EQ(b.retrieval_ratio(), 11.0 / 13);
  EXPECT_EQ(Ledger{}.retrieval_ratio(), 0);
  EXPECT_EQ(b.select_ns, 24u);
  EXPECT_EQ(b.read_ns, 26u);
  EXPECT_EQ(b.compute_ns, 28u);
  EXPECT_EQ(b.mean_rho_z(), 0.25);
  EXPECT_EQ(b.tokens_per_step(), 5.0);
  EXPECT_EQ(Ledger{}.mean_rho_z(), 0.0);
  EXPECT_EQ(Ledger{}.tokens_per_step(), 0.0);
}

}  // namespace
}  // namespace prefixd
