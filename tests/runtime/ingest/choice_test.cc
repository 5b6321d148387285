// Tests the choice of estimators per head: sessions must do what the choices record.
#include <algorithm>
#include <cmath>
#include <map>

#include "attention/reference/diagnostics.h"
#include "runtime/ingest/choice.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

class ChoiceTest : public RuntimeTest {
 protected:
  // Returns the mean relative l1 error of each KV head of `layer` over queries [first, last)
  // against exact attention, on the prefix cut at n.
  std::vector<double> Errors(const SyntheticPrompt& prompt, uint32_t layer, uint32_t n,
                             const StepPolicy& policy, uint32_t last) {
    const KvGeometry& g = prompt.geometry;
    StepPolicy full;
    full.mode = StepMode::kFull;
    auto exact = store_->Attach({"tiny", "", prompt.tokens, "", n, full});
    auto tried = store_->Attach({"tiny", "", prompt.tokens, "", n, policy});
    EXPECT_TRUE(exact.ok() && tried.ok());
    std::vector<double> errors(g.n_kv_heads);
    if (!exact.ok() || !tried.ok()) return errors;
    for (uint32_t t = n; t < last; ++t) {
      const Output a = Step(**tried, layer, prompt.Q(layer, t, 1));
      const Output b = Step(**exact, layer, prompt.Q(layer, t, 1));
      for (uint32_t h = 0; h < g.n_q_heads; ++h) {
        const auto of = [&](const Output& o) {
          return std::span<const float>(o.y).subspan(h * g.value_dim, g.value_dim);
        };
        errors[h / g.group_size(0)] += RelativeL1(of(a), of(b)) / ((last - n) * g.group_size(0));
      }
    }
    return errors;
  }
};

TEST_F(ChoiceTest, RecordsTheErrorsThatSessionsMakeAndTakesTheLeast) {
  const uint64_t seed = Seed("RecordsTheErrorsThatSessionsMake");
  options_.query_samples = 100;  // the whole last quarter
  options_.choice_budgets = {0.01, 0.1, 0.4};
  options_.clusters = 6;
  auto all = ParseVariants(
      "none, moment, moment/r3, moment/full, moment/full/cov, centroid, scan, phi, "
      "phi/bf16, phi/per_feature");
  ASSERT_OK(all);
  options_.estimators = *all;
  AddMaps(1024, seed);
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 400, seed);
  const std::string id = PutReady(prompt);
  const auto detail = store_->Prefix(id);
  ASSERT_OK(detail);
  ASSERT_EQ(detail->choices.size(), 2u * 2u * 2u);  // 1% pays for nothing
  for (const double budget : {0.1, 0.4}) {
    for (uint32_t l = 0; l < 2; ++l) {
      std::map<EstimatorVariant, std::vector<double>> errors;
      std::vector<EstimatorVariant> tried = options_.estimators;
      tried.push_back(EstimatorKind::kAuto);
      for (const EstimatorVariant& estimator : tried) {
        StepPolicy policy;
        policy.estimator = estimator;
        policy.budget = budget;
        policy.spread = false;
        auto affordable = store_->Attach({"tiny", "", prompt.tokens, "", 300, policy});
        if (!affordable.ok()) {
          EXPECT_EQ(affordable.error().code, Code::kInfeasible) << affordable.error().ToString();
          continue;
        }
        errors[estimator] = Errors(prompt, l, 300, policy, 400);
      }
      for (const HeadChoice& choice : detail->choices) {
        if (choice.layer != l || choice.budget != budget) continue;
        const uint32_t h = choice.kv_head;
        double least = 1e300;
        for (const EstimatorError& e : choice.errors) {
          EXPECT_NEAR(e.error, errors[e.estimator][h], 2e-4) << e.estimator.Name();
          least = std::min(least, e.error);
        }
        EXPECT_EQ(choice.errors.front().estimator, choice.chosen);
        EXPECT_LE(choice.errors.front().error, least + kErrorResolution);
        EXPECT_NEAR(errors[EstimatorKind::kAuto][h], choice.errors.front().error, 2e-4);
      }
    }
  }
}

// Where scan measured best, sessions that search exactly take it, and those by codes take the next:
// the scores of all keys would make their search several times as long.
TEST_F(ChoiceTest, ScanIsForExactSearchAlone) {
  const uint64_t seed = Seed("ScanIsForExactSearchAlone");
  options_.query_samples = 100;
  options_.choice_budgets = {0.03, 0.1};
  options_.estimators = *ParseVariants("none, scan");
  options_.clusters = 6;
  options_.build_codes = true;
  options_.codes_min_tokens = 1024;
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 2400, seed);
  const auto detail = store_->Prefix(PutReady(prompt));
  ASSERT_OK(detail);
  ASSERT_EQ(detail->choices.size(), 2u * 2u * 2u);
  for (const double budget : options_.choice_budgets) {
    int scans = 0;
    for (const HeadChoice& choice : detail->choices) {
      ASSERT_EQ(choice.errors.size(), 2u);
      EXPECT_EQ(choice.chosen, EstimatorVariant(EstimatorKind::kNone));
      if (choice.budget == budget) scans += choice.errors.front().estimator == EstimatorKind::kScan;
    }
    ASSERT_GT(scans, 0);
    for (const char* selector : {"auto", "codes", "exact"}) {
      StepPolicy policy;
      policy.budget = budget;
      policy.selector = selector;
      policy.spread = false;
      const auto session = Attach(prompt, policy);
      ASSERT_TRUE(session);
      const bool takes =
          session->info().estimator.find("scan " + std::to_string(scans)) != std::string::npos;
      EXPECT_EQ(takes, selector == std::string("exact"))
          << selector << ": " << session->info().estimator << ", scan is best on " << scans;
    }
  }
}

// Tokens go where the put's queries gained most by them; in total no more is read, whatever the
// estimators cost, and the session's ledger is held to it.
TEST_F(ChoiceTest, TheBudgetIsSpreadAndNeverExceeded) {
  const uint64_t seed = Seed("TheBudgetIsSpread");
  options_.clusters = 6;
  AddMaps(1024, seed);
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 1400, seed);
  ASSERT_NE(PutReady(prompt), "");
  // Of 1400 tokens and 20 anchors 2% is the least that was measured, and 10% the most.
  for (const double budget : {0.02, 0.03, 0.05, 0.1, 0.3}) {
    SCOPED_TRACE(budget);
    std::map<bool, std::vector<uint32_t>> k;
    for (const bool spread : {false, true}) {
      StepPolicy policy;
      policy.budget = budget;
      policy.spread = spread;
      const auto session = Attach(prompt, policy);
      ASSERT_TRUE(session);
      for (uint32_t t = 1380; t < 1400; ++t) {
        for (uint32_t layer = 0; layer < 2; ++layer) {
          const Output out = Step(*session, layer, prompt.Q(layer, t, 1));
          if (t > 1380) continue;
          k[spread].insert(k[spread].end(), out.info.k_per_head.begin(), out.info.k_per_head.end());
        }
      }
      const auto report = session->Detach();
      ASSERT_OK(report);
      EXPECT_EQ(report->total.steps, 4u * 20);
      EXPECT_LE(report->total.tokens_per_step(), std::ceil(budget * 1400));
      if (!spread) {
        for (const Ledger& head : report->per_head) {
          EXPECT_LE(head.tokens_per_step(), std::ceil(budget * 1400));
        }
      }
    }
    // At the ends of what was measured, and beyond, nothing is moved.
    EXPECT_EQ(k[true] != k[false], budget > 0.02 && budget < 0.1);
  }
  // What was measured does not hold for what the policy names.
  for (const char* what : {"moment", "k"}) {
    std::vector<std::vector<uint32_t>> k;
    for (const bool spread : {false, true}) {
      StepPolicy policy;
      policy.budget = 0.05;
      policy.spread = spread;
      if (what == std::string("moment")) policy.estimator = EstimatorKind::kMoment;
      if (what == std::string("k")) policy.k = 40;
      const auto session = Attach(prompt, policy);
      ASSERT_TRUE(session);
      k.push_back(Step(*session, 0, prompt.Q(0, 1399, 1)).info.k_per_head);
    }
    EXPECT_EQ(k[0], k[1]) << what;
  }
}

TEST_F(ChoiceTest, WithoutQueriesItIsUntuned) {
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 400, 1);
  const std::string id = PutReady(prompt, /*queries=*/false);
  const auto detail = store_->Prefix(id);
  ASSERT_OK(detail);
  EXPECT_TRUE(detail->choices.empty());
  StepPolicy policy;
  policy.budget = 0.1;
  const auto session = Attach(prompt, policy);
  ASSERT_TRUE(session);
  EXPECT_EQ(session->info().estimator, "moment, untuned");
}

TEST_F(ChoiceTest, AContinuationWithoutQueriesUsesItsParentsChoice) {
  options_.choice_budgets = {0.1};
  Open();
  const auto parent = MakePrompt(spec_.geometry, 400, 2);
  const auto child = MakePrompt(spec_.geometry, 500, 2);
  ASSERT_NE(PutReady(parent), "");
  ASSERT_NE(PutReady(child, /*queries=*/false), "");
  StepPolicy policy;
  policy.budget = 0.1;
  const auto session = Attach(child, policy);
  ASSERT_TRUE(session);
  EXPECT_EQ(session->info().estimator.rfind("chosen per head: ", 0), 0u)
      << session->info().estimator;
}

// Returns the kinds by preference; errors are given cheapest first, as they are measured.
std::vector<EstimatorKind> Order(std::vector<EstimatorError> errors) {
  OrderByPreference(errors);
  std::vector<EstimatorKind> order;
  for (const EstimatorError& e : errors) order.push_back(e.estimator.kind);
  return order;
}

TEST(Choices, RoundingNoiseChoosesNothing) {
  using enum EstimatorKind;
  // Retrieval holds all of this head's mass: the errors differ in the last digits only.
  EXPECT_EQ(Order({{kNone, 1.8793045e-7}, {kMoment, 1.8793045e-7}, {kPhi, 1.8790507e-7}}),
            (std::vector{kNone, kMoment, kPhi}));
  EXPECT_EQ(Order({{kNone, 0.3}, {kMoment, 0.0204}, {kScan, 0.05}, {kPhi, 0.02}}),
            (std::vector{kMoment, kPhi, kScan, kNone}));
  EXPECT_EQ(Order({{kNone, 0.3}, {kMoment, 0.0206}, {kPhi, 0.02}}),
            (std::vector{kPhi, kMoment, kNone}));
  // Each is compared with the best of those left, not with its neighbour.
  EXPECT_EQ(Order({{kNone, 0.0209}, {kMoment, 0.0206}, {kPhi, 0.0202}}),
            (std::vector{kMoment, kPhi, kNone}));
  EXPECT_TRUE(Order({}).empty());
}

TEST(Choices, SurviveSerialization) {
  const std::vector<HeadChoice> choices = {
      {0,
       1,
       EstimatorKind::kScan,
       0.02,
       {{EstimatorKind::kScan, 0.25}, {EstimatorKind::kNone, 0.5}}},
      {3,
       0,
       *EstimatorVariant::Parse("moment/r8"),
       0.05,
       {{*EstimatorVariant::Parse("moment/r8"), 0.125}}},
      {3, 1, EstimatorKind::kNone, 0.05, {}},
  };
  const auto bytes = SerializeChoices(choices);
  auto read = DeserializeChoices(bytes);
  ASSERT_OK(read);
  EXPECT_EQ(*read, choices);
  for (size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_CODE(DeserializeChoices(std::span(bytes).first(n)), Code::kCorrupt);
  }
}

}  // namespace
}  // namespace prefixd::testing
