// Tests GroupStep where it is hardest: nothing and everything retrieved, equal keys, huge scores
// and means.
#include <cmath>
#include <string>

#include "attention/step/step.h"
#include "tests/attention/step_checks.h"
#include "tests/attention/step_fixture.h"
#include "tests/support/infinity.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::BuildAll;
using testing::ExpectMatches;
using testing::kAll;
using testing::OwnedRows;
using testing::Random;
using testing::RandomCase;
using testing::StepCase;
using testing::StepOf;
using testing::StepOutput;

using testing::kInf;

void ExpectFullAttention(const StepCase& c, const StepOutput& out) {
  const reference::States want =
      reference::ExactAttention(c.queries, c.group, c.layer, c.rows.view());
  for (uint32_t g = 0; g < c.group; ++g) {
    const double bound = testing::ExactBound(want.max_abs_score[g]);
    EXPECT_NEAR(out.lse[g], want.lse[g], bound + 1e-7 * std::abs(want.lse[g]));
    EXPECT_EQ(out.rho_z[g], 0);
    for (uint32_t l = 0; l < c.shape().value_dim; ++l) {
      const size_t at = size_t{g} * c.shape().value_dim + l;
      ASSERT_NEAR(out.y[at], want.y[at], bound * want.abs_y[at]);
    }
  }
}

TEST(GroupStepHard, EmptyPrefixIsTheEmptyState) {
  Random random(testing::Seed("GroupStepHard.Empty"));
  StepCase c = RandomCase(random, 0, {16, 8, DType::kBf16}, {}, 3, 1);
  BuildAll(c, random);
  for (EstimatorKind kind : kAll) {
    const StepOutput out = StepOf(c, kind);
    for (float lse : out.lse) EXPECT_EQ(lse, -kInf);
    for (float y : out.y) EXPECT_EQ(y, 0);
    for (float rho : out.rho_z) EXPECT_EQ(rho, 0);
  }
}

TEST(GroupStepHard, AnchorsCoveringEverythingAndOneTokenPrefixes) {
  Random random(testing::Seed("GroupStepHard.Anchors"));
  for (uint32_t n : {1u, 2u, 4u, 5u, 19u, 20u}) {
    StepCase c = RandomCase(random, n, {24, 40, DType::kF16}, {}, 4, 2);
    BuildAll(c, random);
    for (EstimatorKind kind : kAll) ExpectFullAttention(c, StepOf(c, kind));
  }
}

TEST(GroupStepHard, EverythingRetrievedIsFullAttentionWithEveryEstimator) {
  Random random(testing::Seed("GroupStepHard.All"));
  for (uint32_t group : {1u, 8u}) {
    StepCase c = RandomCase(random, 90, {32, 16, DType::kBf16}, {}, group, 3);
    BuildAll(c, random);
    c.RetrieveTop(c.parts.mid.size());
    for (EstimatorKind kind : kAll) ExpectFullAttention(c, StepOf(c, kind));
  }
}

TEST(GroupStepHard, NothingRetrieved) {
  Random random(testing::Seed("GroupStepHard.K0"));
  StepCase c = RandomCase(random, 300, {32, 16, DType::kBf16}, {}, 4, 1);
  BuildAll(c, random);
  c.RetrieveTop(0);
  for (EstimatorKind kind : {EstimatorKind::kMoment, EstimatorKind::kPhi}) {
    ExpectMatches(c, kind, [](const GroupStepInput&, uint32_t) { return 5e-5; });
  }
  // Without an exact set the state is the estimate alone.
  StepCase bare = RandomCase(random, 300, {32, 16, DType::kBf16}, {0, 0}, 4, 1);
  BuildAll(bare, random);
  for (EstimatorKind kind : {EstimatorKind::kMoment, EstimatorKind::kPhi}) {
    const StepOutput out = StepOf(bare, kind);
    for (float rho : out.rho_z) EXPECT_EQ(rho, 1);
    for (float y : out.y) EXPECT_TRUE(std::isfinite(y));
  }
}

TEST(GroupStepHard, OneTokenLeft) {
  Random random(testing::Seed("GroupStepHard.One"));
  for (int round = 0; round < 50; ++round) {
    StepCase c = RandomCase(random, 60, {16, 8, DType::kF32}, {2, 3}, 2, 1);
    BuildAll(c, random);
    c.RetrieveTop(c.parts.mid.size() - 1);
    // The remainder's mean is the token itself, so its mass and its value are known.
    const StepOutput out = StepOf(c, EstimatorKind::kMoment);
    const reference::States want =
        reference::ExactAttention(c.queries, c.group, c.layer, c.rows.view());
    for (uint32_t g = 0; g < c.group; ++g) {
      EXPECT_NEAR(out.lse[g], want.lse[g], 2e-4);
      for (int l = 0; l < 8; ++l) EXPECT_NEAR(out.y[g * 8 + l], want.y[g * 8 + l], 1e-3);
    }
    for (float y : StepOf(c, EstimatorKind::kPhi).y) EXPECT_TRUE(std::isfinite(y));
  }
}

TEST(GroupStepHard, IdenticalKeysAreEstimatedExactly) {
  Random random(testing::Seed("GroupStepHard.Identical"));
  const std::vector<float> key = random.Normals(16, 2);
  OwnedRows rows({16, 8, DType::kF32}, 200);
  for (size_t i = 0; i < 200; ++i) rows.Set(i, key, random.Normals(8));
  StepCase c(std::move(rows), {}, 2, random.Normals(32, 3), 0.25f);
  BuildAll(c, random);
  const reference::States full = reference::ExactAttention(c.queries, 2, c.layer, c.rows.view());
  for (uint32_t k : {0u, 1u, 100u, 179u}) {
    c.RetrieveTop(k);
    const StepOutput moment = StepOf(c, EstimatorKind::kMoment);
    // Every surrogate is wrong by one factor; the bracket |R|e^mean = |R|e^c corrects it.
    const StepOutput phi = StepOf(c, EstimatorKind::kPhi);
    for (const StepOutput* out : {&moment, &phi}) {
      for (uint32_t g = 0; g < 2; ++g) {
        EXPECT_NEAR(out->lse[g], full.lse[g], 1e-4) << "k " << k;
        for (int l = 0; l < 8; ++l) {
          EXPECT_NEAR(out->y[g * 8 + l], full.y[g * 8 + l], 2e-3) << "k " << k;
        }
      }
    }
  }
}

TEST(GroupStepHard, OneTokenOwningAFeature) {
  Random random(testing::Seed("GroupStepHard.Owner"));
  StepCase c = RandomCase(random, 100, {4, 3, DType::kF32}, {2, 2}, 1, 0.5);
  // Feature 0 is 20 nats above the rest at one token, feature 1 is flat.
  OwnedRows rows = c.rows;
  for (size_t i = 0; i < 100; ++i) {
    std::vector<float> key = rows.Key(i);
    key[0] = i == 50 ? 20.0f : 0.0f;
    rows.Set(i, key, rows.Value(i));
  }
  StepCase owner(std::move(rows), {2, 2}, 1, c.queries, 0.05f);
  FeatureMap map;
  map.in_dim = 4, map.d_emb = 4, map.d_phi = 2;
  map.w_in = {1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1};
  map.b_in.assign(4, 0), map.w1.assign(16, 0), map.b1.assign(4, 0);
  map.w2.assign(16, 0), map.b2.assign(4, 0);
  map.w_out = {1, 0, 0, 0, 0, 0, 0, 0};
  map.b_out.assign(2, 0);
  owner.phi_k = map;
  owner.phi_q = {map};
  owner.phi_q[0].w_out.assign(8, 0);
  owner.phi = PhiCache(2, 3);
  owner.phi.Add(owner.Mid(), map);
  owner.cuts = {{100, CutKind::kApproximate}};
  for (const std::vector<uint32_t>& ids :
       {std::vector<uint32_t>{}, std::vector<uint32_t>{50}, std::vector<uint32_t>{3, 50, 70}}) {
    owner.Retrieve(ids);
    const StepOutput out = StepOf(owner, EstimatorKind::kPhi);
    EXPECT_TRUE(std::isfinite(out.lse[0]));
    EXPECT_GE(out.rho_z[0], 0);
    EXPECT_LE(out.rho_z[0], 1);
    for (float y : out.y) {
      EXPECT_TRUE(std::isfinite(y));
      // Values are normal: cancelled noise must not be blown up into large outputs.
      EXPECT_LT(std::abs(y), 10) << ids.size() << " retrieved";
    }
  }
  // The owner is no part of the sums: with it retrieved the others are estimated as before.
  ASSERT_EQ(owner.phi.apart().size(), 1u);
  owner.Retrieve({50});
  EXPECT_GT(StepOf(owner, EstimatorKind::kPhi).rho_z[0], 0);
}

TEST(GroupStepHard, ScoresOfPlusMinusEighty) {
  Random random(testing::Seed("GroupStepHard.Eighty"));
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    OwnedRows rows({16, 8, dtype}, 120);
    for (size_t i = 0; i < 120; ++i) {
      std::vector<float> key(16, 0.0f);
      key[i % 16] = i % 2 == 0 ? 80.0f : -80.0f;
      rows.Set(i, key, random.Normals(8));
    }
    StepCase c(std::move(rows), {}, 2, std::vector<float>(32, 1.0f), 1.0f);
    BuildAll(c, random);
    c.RetrieveTop(40);
    ExpectMatches(c, EstimatorKind::kNone, nullptr);
    for (EstimatorKind kind : kAll) {
      for (float y : StepOf(c, kind).y) EXPECT_TRUE(std::isfinite(y));
    }
  }
}

TEST(GroupStepHard, CutsOfEachKindAndInfinity) {
  Random random(testing::Seed("GroupStepHard.Cuts"));
  StepCase c = RandomCase(random, 200, {16, 8, DType::kBf16}, {}, 2, 1.5);
  BuildAll(c, random);
  c.RetrieveTop(15);
  const float exact = c.cuts[0].score;
  for (CutKind kind : {CutKind::kExact, CutKind::kApproximate, CutKind::kNone}) {
    for (float score : {kInf, -kInf, exact, -1e30f, 1e30f, 0.0f}) {
      c.cuts.assign(2, {score, kind});
      SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)) + " score " +
                   std::to_string(score));
      ExpectMatches(c, EstimatorKind::kMoment,
                    [](const GroupStepInput&, uint32_t) { return 2e-4; });
      const StepOutput phi = StepOf(c, EstimatorKind::kPhi);
      for (float y : phi.y) EXPECT_TRUE(std::isfinite(y));
    }
  }
  // An exact cut bounds the mass from above, under every estimator.
  c.RetrieveTop(15);
  for (EstimatorKind kind : {EstimatorKind::kMoment, EstimatorKind::kPhi}) {
    const GroupStepInput in = c.Input(kind);
    const double r = static_cast<double>(in.mid_count - in.retrieved.count);
    const StepOutput out = StepOf(c, kind);
    const StepOutput selected = StepOf(c, EstimatorKind::kNone);
    for (uint32_t g = 0; g < 2; ++g) {
      const double z_r = std::log(std::exp(out.lse[g]) - std::exp(selected.lse[g]));
      EXPECT_LE(z_r, std::log(r) + c.cuts[g].score + 1e-3);
    }
  }
}

TEST(GroupStepHard, ALargeCommonMeanDoesNotSpoilTheVariance) {
  Random random(testing::Seed("GroupStepHard.MeanThirty"));
  OwnedRows rows({8, 4, DType::kF32}, 3000);
  for (size_t i = 0; i < 3000; ++i) {
    std::vector<float> key = random.Normals(8, 0.1f);
    key[0] += 30;
    rows.Set(i, key, random.Normals(4));
  }
  StepCase c(std::move(rows), {}, 2, random.Normals(16), 0.35f);
  BuildAll(c, random);
  for (uint32_t k : {0u, 100u, 2900u}) {
    c.RetrieveTop(k);
    ExpectMatches(c, EstimatorKind::kMoment, [](const GroupStepInput&, uint32_t) { return 2e-3; });
  }
}

}  // namespace
}  // namespace prefixd
