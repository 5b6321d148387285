// Tests the reference itself, against worked numbers and against the truth that estimators
// approximate.
#include "attention/reference/reference.h"

#include <cmath>
#include <limits>

#include "tests/attention/step_fixture.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::OwnedRows;
using testing::Random;
using testing::StepCase;

TEST(Reference, TwoTokensByHand) {
  OwnedRows rows({1, 2, DType::kF32}, 2);
  rows.Set(0, std::vector<float>{1}, std::vector<float>{1, 0});
  rows.Set(1, std::vector<float>{2}, std::vector<float>{0, 1});
  const float q = 2;
  // Scores 0.5 * 2 * {1, 2} = {1, 2}.
  const reference::States s =
      reference::ExactAttention(std::span(&q, 1), 1, {0.5f, 0, 0}, rows.view());
  const double e = std::exp(1.0);
  EXPECT_NEAR(s.lse[0], std::log(e + e * e), 1e-12);
  EXPECT_NEAR(s.y[0], 1 / (1 + e), 1e-12);
  EXPECT_NEAR(s.y[1], e / (1 + e), 1e-12);
  const reference::States capped =
      reference::ExactAttention(std::span(&q, 1), 1, {0.5f, 1, 0}, rows.view());
  EXPECT_NEAR(capped.lse[0], std::log(std::exp(std::tanh(1.0)) + std::exp(std::tanh(2.0))), 1e-12);
}

// With features that make the kernel exact, phi completion is full attention: d_phi = 1,
// log phi_k(k) = k, log phi_q(q) = q, and scores q + k through an augmented key (k, 1).
TEST(Reference, PhiCompletionIsExactWhenTheFeaturesAre) {
  Random random(testing::Seed("Reference.PhiExact"));
  OwnedRows rows({2, 3, DType::kF32}, 60);
  for (size_t i = 0; i < 60; ++i) {
    rows.Set(i, std::vector<float>{random.Normal(), 1}, random.Normals(3));
  }
  // score = 1 * k + q: query (1, q).
  StepCase c(std::move(rows), {2, 5}, 1, {1.0f, 0.7f}, 1.0f);
  const auto linear = [](float a, float b) {
    FeatureMap map;
    map.in_dim = 2, map.d_emb = map.d_phi = 1;
    map.w_in = {a, b}, map.b_in = {0}, map.w1 = {0}, map.b1 = {0}, map.w2 = {0}, map.b2 = {0};
    map.w_out = {1}, map.b_out = {0};
    return map;
  };
  c.phi_k = linear(1, 0);
  c.phi_q = {linear(0, 1)};
  c.phi = PhiCache(1, 3);
  c.phi.Add(c.Mid(), c.phi_k);
  const reference::States full = reference::ExactAttention(c.queries, 1, c.layer, c.rows.view());
  for (uint32_t k : {0u, 1u, 20u, 52u}) {
    c.RetrieveTop(k);
    for (auto form : {PhiForm::kSigned, PhiForm::kPerFeature}) {
      GroupStepInput in = c.Input(EstimatorKind::kPhi);
      in.phi_form = form;
      const reference::States s = reference::GroupStep(in, 3);
      EXPECT_NEAR(s.lse[0], full.lse[0], 1e-4) << "k " << k;
      for (int l = 0; l < 3; ++l) EXPECT_NEAR(s.y[l], full.y[l], 1e-4) << "k " << k;
    }
  }
}

TEST(Reference, SignedAndPerFeatureFormsAgreeWhereNothingIsClamped) {
  Random random(testing::Seed("Reference.Forms"));
  for (int round = 0; round < 60; ++round) {
    StepCase c = testing::RandomCase(random, 120, {8, 4, DType::kF32}, {2, 4}, 2, 1);
    c.BuildPhi(random, 8, 6);
    c.Retrieve(testing::RandomSubset(random, c.parts.mid.begin, c.parts.mid.end, 10));
    const GroupStepInput in = c.Input(EstimatorKind::kPhi);
    const reference::States a = reference::GroupStep(in, 4);
    GroupStepInput parity = in;
    parity.phi_form = PhiForm::kPerFeature;
    const reference::States b = reference::GroupStep(parity, 4);
    for (uint32_t g = 0; g < 2; ++g) {
      const double share = reference::EstimatePhi(in, g, PhiForm::kSigned).share;
      if (share < 1e-3) continue;
      EXPECT_NEAR(a.lse[g], b.lse[g], 1e-5 / share);
      for (uint32_t l = 0; l < 4; ++l) {
        EXPECT_NEAR(a.y[g * 4 + l], b.y[g * 4 + l], 1e-5 / share);
      }
    }
  }
}

// For keys jointly Gaussian with values the estimate without a cut is exact but for sampling.
TEST(Reference, MomentEstimateIsTheGaussianTruthWithoutACut) {
  Random random(testing::Seed("Reference.Gaussian"));
  constexpr uint32_t kDim = 16, kTokens = 60000;
  OwnedRows rows({kDim, 2, DType::kF32}, kTokens);
  for (size_t i = 0; i < kTokens; ++i) {
    const std::vector<float> key = random.Normals(kDim);
    const float value[2] = {1 + key[0] + 0.5f * random.Normal(), random.Normal()};
    rows.Set(i, key, value);
  }
  StepCase c(std::move(rows), {0, 0}, 1, random.Normals(kDim, 0.8f), 0.25f);
  c.BuildMoment(true);
  c.cuts = {{std::numeric_limits<float>::infinity(), CutKind::kExact}};
  const GroupStepInput in = c.Input(EstimatorKind::kMoment);
  const reference::Estimate estimate = reference::EstimateMoment(in, 0);
  const reference::States full = reference::ExactAttention(c.queries, 1, c.layer, c.rows.view());
  EXPECT_NEAR(estimate.log_z, full.lse[0], 0.03);
  EXPECT_NEAR(estimate.y[0], full.y[0], 0.05);
  EXPECT_NEAR(estimate.y[1], full.y[1], 0.05);
}

}  // namespace
}  // namespace prefixd
