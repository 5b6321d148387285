// GroupStep against the float64 reference: random shapes within the bound, then the hard cases.
#include "attention/step.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>

#include "attention/diagnostics.h"
#include "step_fixture.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::OwnedRows;
using testing::Random;
using testing::RandomCase;
using testing::StepCase;
using testing::StepOutput;

constexpr float kInf = std::numeric_limits<float>::infinity();

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

// `amplified(g)`: how far the estimate's own rounding exceeds the exact part's, 0 without one.
void ExpectMatches(const StepCase& c, EstimatorKind kind,
                   const std::function<double(const GroupStepInput&, uint32_t)>& amplified) {
  const GroupStepInput in = c.Input(kind);
  StepOutput out = c.Buffers();
  const Status status = GroupStep(in, out.spans());
  ASSERT_TRUE(status.ok()) << status.error().message;
  const uint32_t dv = c.shape().value_dim;
  const reference::States want = reference::GroupStep(in, dv);
  for (uint32_t g = 0; g < c.group; ++g) {
    const double bound = testing::ExactBound(want.max_abs_score[g]);
    const double extra = amplified ? amplified(in, g) : 0;
    if (want.lse[g] == -kInf) {
      ASSERT_EQ(out.lse[g], -kInf);
    } else {
      ASSERT_NEAR(out.lse[g], want.lse[g],
                  bound + 1e-7 * std::abs(want.lse[g]) + extra * want.rho_z[g])
          << "head " << g;
    }
    ASSERT_NEAR(out.rho_z[g], want.rho_z[g], 4 * bound + extra) << "head " << g;
    double largest = 0;
    for (uint32_t l = 0; l < dv; ++l) {
      largest = std::max(largest, want.abs_y[size_t{g} * dv + l]);
    }
    for (uint32_t l = 0; l < dv; ++l) {
      const size_t at = size_t{g} * dv + l;
      const double slack = extra * want.rho_z[g] * (largest + 4);
      ASSERT_NEAR(out.y[at], want.y[at], bound * want.abs_y[at] + slack + 1e-30)
          << "head " << g << " element " << l << " rho " << want.rho_z[g];
    }
  }
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

// ---- hard cases --------------------------------------------------------------------------------

const EstimatorKind kAll[] = {EstimatorKind::kNone, EstimatorKind::kMoment, EstimatorKind::kPhi};

void BuildAll(StepCase& c, Random& random) {
  c.BuildMoment(true);
  c.BuildPhi(random, 8, 12);
}

StepOutput StepOf(const StepCase& c, EstimatorKind kind) {
  StepOutput out = c.Buffers();
  const Status status = GroupStep(c.Input(kind), out.spans());
  EXPECT_TRUE(status.ok()) << (status.ok() ? "" : status.error().message);
  return out;
}

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
  // No exact set at all: the state is the estimate alone.
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
    // The remainder's mean is the token itself: its mass is known, its value too.
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
  // With the owner retrieved what is left is noise against its mass, and counts as none.
  owner.Retrieve({50});
  EXPECT_EQ(StepOf(owner, EstimatorKind::kPhi).rho_z[0], 0);
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
  // An exact cut bounds the mass from above, whatever the estimator says.
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

// ---- what the estimate is for ------------------------------------------------------------------

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

// ---- refusals ----------------------------------------------------------------------------------

void ExpectRefused(const StepCase& c, const GroupStepInput& in, const std::string& part) {
  StepOutput out = c.Buffers();
  const Status status = GroupStep(in, out.spans());
  ASSERT_FALSE(status.ok()) << part;
  EXPECT_EQ(status.error().code, Code::kInvalidArgument);
  EXPECT_NE(status.error().message.find(part), std::string::npos) << status.error().message;
}

TEST(GroupStepRefuses, NonFiniteInputsNamingTensorAndRow) {
  Random random(testing::Seed("GroupStepRefuses.NonFinite"));
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    for (float bad : {kInf, -kInf, std::nanf("")}) {
      StepCase c = RandomCase(random, 100, {37, 19, dtype}, {}, 3, 1);
      c.Retrieve(testing::RandomSubset(random, 4, 84, 30));
      BuildAll(c, random);
      for (EstimatorKind kind : kAll) {
        StepCase broken = c;
        broken.queries[37 + 2] = bad;
        ExpectRefused(broken, broken.Input(kind), "query head 1");
        const auto damage = [&](OwnedRows& rows, size_t row, bool in_key) {
          std::vector<float> key = rows.Key(row), value = rows.Value(row);
          (in_key ? key : value)[in_key ? 36 : 18] = bad;
          rows.Set(row, key, value);
        };
        for (bool in_key : {true, false}) {
          const std::string part = in_key ? " key: row " : " value: row ";
          broken = c;
          damage(broken.retrieved, 29, in_key);
          ExpectRefused(broken, broken.Input(kind), "retrieved" + part + "29");
          broken = c;
          damage(broken.rows, 3, in_key);
          ExpectRefused(broken, broken.Input(kind), "sinks" + part + "3");
          broken = c;
          damage(broken.rows, 84, in_key);
          ExpectRefused(broken, broken.Input(kind), "tail" + part + "0");
        }
      }
    }
  }
}

TEST(GroupStepRefuses, WhatDoesNotFit) {
  Random random(testing::Seed("GroupStepRefuses.Shapes"));
  StepCase c = RandomCase(random, 100, {16, 8, DType::kBf16}, {}, 4, 1);
  BuildAll(c, random);
  c.RetrieveTop(10);
  GroupStepInput in = c.Input(EstimatorKind::kMoment);
  in.layer.softcap = 30;
  ExpectRefused(c, in, "softcap");
  in = c.Input(EstimatorKind::kMoment);
  in.estimator = EstimatorKind::kAuto;
  ExpectRefused(c, in, "auto");
  in = c.Input(EstimatorKind::kMoment);
  in.moment = nullptr;
  ExpectRefused(c, in, "needs a moment summary");
  in = c.Input(EstimatorKind::kMoment);
  in.mid_count = 79;
  ExpectRefused(c, in, "80 tokens");
  in = c.Input(EstimatorKind::kMoment);
  in.mid_count = 5;
  ExpectRefused(c, in, "10 retrieved rows");
  in = c.Input(EstimatorKind::kPhi);
  in.phi_k = nullptr;
  ExpectRefused(c, in, "phi_k");
  in = c.Input(EstimatorKind::kPhi);
  in.moment = nullptr;
  in.mid_count = 79;
  ExpectRefused(c, in, "phi cache is of 80");
  in = c.Input(EstimatorKind::kNone);
  in.cuts = in.cuts.first(3);
  ExpectRefused(c, in, "cuts");
  in = c.Input(EstimatorKind::kNone);
  in.queries = in.queries.first(63);
  ExpectRefused(c, in, "queries");
  in = c.Input(EstimatorKind::kNone);
  in.queries = in.queries.first(32);
  ExpectRefused(c, in, "16+8");
  const std::vector<Cut> nan_cuts(4, {std::nanf(""), CutKind::kExact});
  in = c.Input(EstimatorKind::kMoment);
  in.cuts = nan_cuts;
  ExpectRefused(c, in, "cut");
  OwnedRows other = testing::RandomRows(random, {16, 8, DType::kF32}, 2);
  in = c.Input(EstimatorKind::kNone);
  in.tail = other.view();
  ExpectRefused(c, in, "dtype");
  // With a softcap, selection only is fine, and matches.
  c.layer.softcap = 5;
  ExpectMatches(c, EstimatorKind::kNone, nullptr);
}

}  // namespace
}  // namespace prefixd
