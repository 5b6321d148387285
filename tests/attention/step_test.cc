// Tests GroupStep against the float64 reference on random shapes, and the benefit of its estimate.
#include "attention/step/step.h"

#include <cmath>
#include <string>

#include "attention/reference/diagnostics.h"
#include "tests/attention/step_checks.h"
#include "tests/attention/step_fixture.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::ExpectMatches;
using testing::OwnedRows;
using testing::Random;
using testing::RandomCase;
using testing::StepCase;
using testing::StepOf;
using testing::StepOutput;

StepCase AnyCase(Random& random, uint32_t max_tokens, uint32_t max_dim) {
  const RowShape shape{random.Int(1, max_dim), random.Int(1, max_dim), random.AnyDType()};
  const Anchors anchors{random.Int(0, 5), random.Int(0, 17)};
  StepCase c = RandomCase(random, random.Int(0, max_tokens), shape, anchors, random.Int(1, 16),
                          std::exp2(random.Uniform(-3, 4)));
  const uint32_t mid = c.parts.mid.size();
  const uint32_t k = random.Chance(0.1) ? mid : random.Chance(0.1) ? 0 : random.Int(0, mid);
  if (random.Chance(0.6)) {
    c.RetrieveTop(k);
  } else {
    c.Retrieve(testing::RandomSubset(random, c.parts.mid.begin, c.parts.mid.end, k));
    if (random.Chance(0.5)) {
      c.cuts.assign(c.group, {random.Normal() * 3,
                              random.Chance(0.5) ? CutKind::kApproximate : CutKind::kNone});
    }
  }
  return c;
}

std::string Describe(const StepCase& c, int round) {
  return "round " + std::to_string(round) + ": N " + std::to_string(c.rows.count()) + " G " +
         std::to_string(c.group) + " K " + std::to_string(c.ids.size()) + " of " +
         std::to_string(c.parts.mid.size()) + " dk " + std::to_string(c.shape().key_dim) + " dv " +
         std::to_string(c.shape().value_dim) + " " + std::string(DTypeName(c.shape().dtype));
}

TEST(GroupStep, SelectionOnlyWithinTheBoundOnRandomShapes) {
  Random random(testing::Seed("GroupStep.None"));
  for (int round = 0; round < 2000; ++round) {
    const StepCase c = AnyCase(random, 70, round % 8 == 0 ? 256 : 80);
    SCOPED_TRACE(Describe(c, round));
    ExpectMatches(c, EstimatorKind::kNone, nullptr);
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(GroupStep, MomentMatchesTheReferenceOnRandomShapes) {
  Random random(testing::Seed("GroupStep.Moment"));
  for (int round = 0; round < 900; ++round) {
    StepCase c = AnyCase(random, 120, 40);
    c.BuildMoment(random.Chance(0.5));
    SCOPED_TRACE(Describe(c, round));
    ExpectMatches(c, EstimatorKind::kMoment, [](const GroupStepInput& in, uint32_t g) {
      if (in.mid_count == in.retrieved.count) return 0.0;
      const double share = reference::EstimateMoment(in, g).share;
      double largest = 1;
      for (double s : reference::Scores(in.queries.subspan(0, in.queries.size() / in.group),
                                        in.layer, in.retrieved)) {
        largest = std::max(largest, std::abs(s));
      }
      return 2e-5 * largest / share;
    });
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(GroupStep, PhiMatchesTheReferenceOnRandomShapes) {
  Random random(testing::Seed("GroupStep.Phi"));
  int compared = 0;
  for (int round = 0; round < 350; ++round) {
    StepCase c = AnyCase(random, 90, 32);
    c.BuildPhi(random, random.Int(1, 20), random.Int(1, 24));
    if (random.Chance(0.5)) c.BuildMoment(false);
    SCOPED_TRACE(Describe(c, round));
    bool ill_conditioned = false;
    const GroupStepInput in = c.Input(EstimatorKind::kPhi);
    for (uint32_t g = 0; g < c.group && in.mid_count > in.retrieved.count; ++g) {
      // Near the share below which the remainder counts as none the two may fall on either side.
      ill_conditioned |= reference::EstimatePhi(in, g, PhiForm::kSigned).share < 2e-4;
    }
    if (ill_conditioned) continue;
    ++compared;
    ExpectMatches(c, EstimatorKind::kPhi, [](const GroupStepInput& step, uint32_t g) {
      if (step.mid_count == step.retrieved.count) return 0.0;
      return 5e-5 / reference::EstimatePhi(step, g, PhiForm::kSigned).share;
    });
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(compared, 200);
}

TEST(GroupStep, ScoresComputedBeforehandChangeNoBit) {
  Random random(testing::Seed("GroupStep.KnownScores"));
  for (int round = 0; round < 200; ++round) {
    StepCase c = AnyCase(random, 300, 140);
    if (round % 2 == 0) c.layer.softcap = random.Uniform(1, 30);
    testing::BuildAll(c, random);
    SCOPED_TRACE(Describe(c, round));
    for (const EstimatorKind kind : testing::kAll) {
      if (c.layer.softcap > 0 && kind != EstimatorKind::kNone) continue;
      GroupStepInput in = c.Input(kind);
      StepOutput plain = c.Buffers(), known = c.Buffers();
      ASSERT_TRUE(GroupStep(in, plain.spans()).ok());
      std::vector<float> scores(c.group * in.retrieved.count);
      StepScores(in.queries, c.group, in.layer, in.retrieved, scores);
      // Scoring run by run gives the same bits.
      std::vector<float> by_runs(scores.size());
      const size_t run = 1 + random.Int(0, 99);
      for (size_t begin = 0; begin < in.retrieved.count; begin += run) {
        StepScores(in.queries, c.group, in.layer, in.retrieved, begin,
                   std::min(run, in.retrieved.count - begin), by_runs);
      }
      EXPECT_EQ(by_runs, scores);
      in.retrieved_scores = scores;
      ASSERT_TRUE(GroupStep(in, known.spans()).ok());
      EXPECT_EQ(known.y, plain.y);
      EXPECT_EQ(known.lse, plain.lse);
      EXPECT_EQ(known.rho_z, plain.rho_z);
    }
    if (::testing::Test::HasFailure()) return;
  }
}

TEST(GroupStep, CompletionBeatsSelectionOnGaussianKeys) {
  Random random(testing::Seed("GroupStep.Statistics"));
  double none = 0, plain = 0, cross = 0;
  for (int round = 0; round < 20; ++round) {
    OwnedRows rows({32, 16, DType::kBf16}, 1500);
    const std::vector<float> mix = random.Normals(32 * 16, 0.2f);
    for (size_t i = 0; i < 1500; ++i) {
      const std::vector<float> key = random.Normals(32);
      std::vector<float> value = random.Normals(16);
      for (int l = 0; l < 16; ++l) {
        value[l] += 0.5f;
        for (int j = 0; j < 32; ++j) value[l] += mix[l * 32 + j] * key[j];
      }
      rows.Set(i, key, value);
    }
    StepCase c(std::move(rows), {}, 2, random.Normals(64, 1.2f), 1 / std::sqrt(32.0f));
    c.RetrieveTop(15);
    const reference::States full = reference::ExactAttention(c.queries, 2, c.layer, c.rows.view());
    const std::vector<float> truth(full.y.begin(), full.y.end());
    none += RelativeL1(StepOf(c, EstimatorKind::kNone).y, truth);
    c.BuildMoment(false);
    plain += RelativeL1(StepOf(c, EstimatorKind::kMoment).y, truth);
    c.BuildMoment(true);
    cross += RelativeL1(StepOf(c, EstimatorKind::kMoment).y, truth);
  }
  EXPECT_LT(plain, 0.7 * none) << plain / 20 << " against " << none / 20;
  EXPECT_LT(cross, 0.5 * plain) << cross / 20 << " against " << plain / 20;
}

}  // namespace
}  // namespace prefixd
