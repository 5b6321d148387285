// The choice of estimators per head: what is recorded is what sessions then do.
#include <cmath>
#include <map>

#include "attention/diagnostics.h"
#include "runtime/choice.h"
#include "tests/runtime/runtime_fixture.h"

namespace prefixd::testing {
namespace {

class ChoiceTest : public RuntimeTest {
 protected:
  // Mean relative l1 error of each KV head of `layer` over queries [first, last) against exact
  // attention, on the prefix cut at n.
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
        errors[h / g.group_size()] += RelativeL1(of(a), of(b)) / ((last - n) * g.group_size());
      }
    }
    return errors;
  }
};

TEST_F(ChoiceTest, RecordsTheErrorsThatSessionsMakeAndTakesTheLeast) {
  const uint64_t seed = Seed("RecordsTheErrorsThatSessionsMake");
  options_.query_samples = 100;  // all of the last quarter
  options_.choice_budgets = {0.01, 0.1, 0.2};
  AddMaps(1024, seed);
  Open();
  const auto prompt = MakePrompt(spec_.geometry, 400, seed);
  const std::string id = PutReady(prompt);
  const auto detail = store_->Prefix(id);
  ASSERT_OK(detail);
  ASSERT_EQ(detail->choices.size(), 2u * 2u * 2u);  // 1% pays for nothing
  for (const double budget : {0.1, 0.2}) {
    for (uint32_t l = 0; l < 2; ++l) {
      std::map<EstimatorKind, std::vector<double>> errors;
      for (const EstimatorKind estimator : {EstimatorKind::kNone, EstimatorKind::kMoment,
                                            EstimatorKind::kPhi, EstimatorKind::kAuto}) {
        StepPolicy policy;
        policy.estimator = estimator;
        policy.budget = budget;
        errors[estimator] = Errors(prompt, l, 300, policy, 400);
      }
      for (const HeadChoice& choice : detail->choices) {
        if (choice.layer != l || choice.budget != budget) continue;
        const uint32_t h = choice.kv_head;
        EXPECT_NEAR(choice.error_none, errors[EstimatorKind::kNone][h], 1e-5);
        EXPECT_NEAR(choice.error_moment, errors[EstimatorKind::kMoment][h], 1e-5);
        EXPECT_NEAR(choice.error_phi, errors[EstimatorKind::kPhi][h], 1e-4);
        const double least = std::min({choice.error_none, choice.error_moment, choice.error_phi});
        EXPECT_NEAR(errors[EstimatorKind::kAuto][h], least, 1e-4);
        const double chosen = choice.chosen == EstimatorKind::kPhi      ? choice.error_phi
                              : choice.chosen == EstimatorKind::kMoment ? choice.error_moment
                                                                        : choice.error_none;
        EXPECT_EQ(chosen, least);
      }
    }
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

TEST(Choices, SurviveSerialization) {
  const double nan = std::nan("");
  const std::vector<HeadChoice> choices = {
      {0, 1, EstimatorKind::kPhi, 0.02, 0.5, 0.25, nan},
      {3, 0, EstimatorKind::kNone, 0.05, 0.125, nan, nan},
  };
  const auto bytes = SerializeChoices(choices);
  auto read = DeserializeChoices(bytes);
  ASSERT_OK(read);
  ASSERT_EQ(read->size(), 2u);
  for (size_t i = 0; i < 2; ++i) {
    EXPECT_EQ((*read)[i].layer, choices[i].layer);
    EXPECT_EQ((*read)[i].kv_head, choices[i].kv_head);
    EXPECT_EQ((*read)[i].chosen, choices[i].chosen);
    EXPECT_EQ((*read)[i].budget, choices[i].budget);
    EXPECT_EQ((*read)[i].error_none, choices[i].error_none);
    EXPECT_EQ(std::isnan((*read)[i].error_phi), std::isnan(choices[i].error_phi));
    EXPECT_TRUE(std::isnan((*read)[i].error_moment));
  }
  for (size_t n = 0; n < bytes.size(); ++n) {
    EXPECT_CODE(DeserializeChoices(std::span(bytes).first(n)), Code::kCorrupt);
  }
}

}  // namespace
}  // namespace prefixd::testing
