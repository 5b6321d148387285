#include "prefixd/ledger.h"

#include <array>
#include <cmath>
#include <tuple>
#include <type_traits>

#include "attention/step/budget.h"
#include "base/tables/statistics.h"
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

void Fill(auto& value, int with) {
  value = static_cast<std::remove_cvref_t<decltype(value)>>(with);
}
template <size_t n>
void Fill(std::array<uint64_t, n>& parts, int with) {
  for (uint64_t& part : parts) part = static_cast<uint64_t>(with++);
}

TEST(Ledger, AddsEveryField) {
  Ledger one, two;
  int value = 0;
  ForEachStatistic<Ledger>([&](const auto& statistic) {
    Fill(one.*statistic.member, value += 10);
    Fill(two.*statistic.member, 1000 + value);
  });
  const Ledger sum = (Ledger(one) += two) += Ledger{};
  ForEachStatistic<Ledger>([&](const auto& statistic) {
    const auto& [a, b, c] =
        std::tie(one.*statistic.member, two.*statistic.member, sum.*statistic.member);
    if constexpr (requires { a.size(); }) {
      for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(c[i], a[i] + b[i]) << statistic.name;
    } else {
      EXPECT_EQ(c, a + b) << statistic.name;
    }
  });
}

TEST(Ledger, Ratios) {
  Ledger ledger;
  EXPECT_EQ(ledger.retrieval_ratio(), 0);
  EXPECT_EQ(ledger.mean_rho_z(), 0);
  EXPECT_EQ(ledger.tokens_per_step(), 0);
  ledger.steps = 2, ledger.anchor_tokens = 4, ledger.retrieved_tokens = 6;
  ledger.feature_tokens = 0.5, ledger.charged_summary_tokens = 1.5;
  EXPECT_EQ(ledger.tokens_per_step(), 6);
  ledger.selections = 13, ledger.retrievals = 11, ledger.rho_z_sum = 0.5, ledger.rho_z_count = 2;
  EXPECT_DOUBLE_EQ(ledger.retrieval_ratio(), 11.0 / 13);
  EXPECT_EQ(ledger.mean_rho_z(), 0.25);
}

}  // namespace
}  // namespace prefixd
