// Tests the moment estimate against the float64 reference, and its factored cross moment.
#include <cmath>
#include <limits>
#include <vector>

#include "attention/estimators/moments.h"
#include "attention/step/step.h"
#include "tests/attention/step_fixture.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::OwnedRows;
using testing::Random;
using testing::RandomCase;
using testing::StepCase;

TEST(Moments, TheEstimateMatchesTheReference) {
  Random random(testing::Seed("Moments.Estimate"));
  for (int round = 0; round < 300; ++round) {
    const RowShape shape{random.Int(3, 24), random.Int(3, 16), random.AnyDType()};
    StepCase c = RandomCase(random, random.Int(40, 160), shape, {2, 3}, random.Int(1, 5),
                            random.Uniform(0.2, 2.5));
    c.RetrieveTop(random.Int(0, c.parts.mid.size() / 2));
    c.moment = MomentSummary(shape.key_dim, shape.value_dim, true, random.Chance(0.5));
    c.moment.Add(c.Mid());
    if (random.Chance(0.5)) {
      const std::vector<float> rms(shape.key_dim, 1.5f);
      c.moment =
          c.moment.Factored(random.Int(1, 2), random.Chance(0.5) ? rms : std::vector<float>());
    }
    const GroupStepInput in = c.Input(EstimatorKind::kMoment);
    std::vector<float> log_z(c.group), y(size_t{c.group} * shape.value_dim);
    ASSERT_TRUE(EstimateRemainder(in, log_z, y).ok());
    for (uint32_t g = 0; g < c.group; ++g) {
      const reference::Estimate want = reference::EstimateMoment(in, g);
      ASSERT_NEAR(log_z[g], want.log_z, 1e-4 * (1 + std::abs(want.log_z))) << "round " << round;
      for (uint32_t l = 0; l < shape.value_dim; ++l) {
        ASSERT_NEAR(y[g * shape.value_dim + l], want.y[l], 1e-3 * (1 + std::abs(want.y[l])))
            << "round " << round;
      }
    }
  }
}

// For Gaussian scores under an exact cut the estimate is low (attention/estimators/tilt.h). The
// test uses the keys' full covariance, since a cut along the query makes channels depend on one
// another.
TEST(Moments, TheEstimateIsLowForGaussianScores) {
  Random random(testing::Seed("Moments.Gaussian"));
  StepCase c = RandomCase(random, 40000, {16, 4, DType::kF32}, {}, 4, 1.6);
  c.moment = MomentSummary(16, 4, false, true);
  c.moment.Add(c.Mid());
  // Heads are tested separately, each with its own cut.
  for (uint32_t g = 0; g < c.group; ++g) {
    StepCase one(c.rows, {}, 1, {c.queries.begin() + g * 16, c.queries.begin() + (g + 1) * 16},
                 c.layer.scale);
    one.moment = c.moment;
    one.RetrieveTop(4000);
    const OwnedRows left = one.Rest();
    const double truth = reference::ExactAttention(one.queries, 1, one.layer, left.view()).lse[0];
    std::vector<float> log_z(1), y(4);
    ASSERT_TRUE(EstimateRemainder(one.Input(EstimatorKind::kMoment), log_z, y).ok());
    const double ratio = std::exp(log_z[0] - truth);
    EXPECT_LT(ratio, 1) << "head " << g;
    EXPECT_GT(ratio, 0.7) << "head " << g;
  }
}

TEST(Moments, FactorsApproachTheWholeCrossMoment) {
  Random random(testing::Seed("Moments.Factor"));
  const RowShape shape{12, 10, DType::kF32};
  OwnedRows rows(shape, 400);
  const std::vector<float> mix = random.Normals(12 * 10, 0.5f);
  for (size_t i = 0; i < 400; ++i) {
    const std::vector<float> key = random.Normals(12);
    std::vector<float> value(10);
    // Three directions carry everything.
    for (int l = 0; l < 10; ++l) {
      for (int j = 0; j < 3; ++j) value[l] += mix[l * 12 + j] * key[j];
    }
    rows.Set(i, key, value);
  }
  MomentSummary whole(12, 10, true);
  whole.Add(rows.view());
  // The factor minimises the error in this norm: channels weighed by the queries' rms.
  std::vector<float> rms = random.Normals(12);
  for (float& x : rms) x = std::abs(x) + 0.1f;
  const auto error = [&](const MomentSummary& factored) {
    double sum = 0;
    for (uint32_t j = 0; j < 12; ++j) {
      for (uint32_t l = 0; l < 10; ++l) {
        double c = whole.cross()[j * 10 + l];
        for (uint32_t f = 0; f < factored.cross_rank(); ++f) {
          c -= factored.key_factor()[j * factored.cross_rank() + f] *
               factored.value_factor()[f * 10 + l];
        }
        sum += std::pow(rms[j] * c, 2);
      }
    }
    return std::sqrt(sum);
  };
  double before = std::numeric_limits<double>::infinity();
  for (uint32_t rank = 1; rank <= 9; ++rank) {
    const double now = error(whole.Factored(rank, rms));
    EXPECT_LE(now, before * (1 + 1e-9)) << "rank " << rank;
    before = now;
    // The factor weighted for these queries serves them better than the unweighted one, or equally.
    EXPECT_LE(now, error(whole.Factored(rank, {})) * (1 + 1e-6) + 1e-9) << "rank " << rank;
  }
  EXPECT_NEAR(error(whole.Factored(9, rms)), 0, 0.02 * error(whole.Factored(1, rms)));
  // Merging expands: counts add up, and C is whole again.
  MomentSummary merged = whole.Factored(4, rms);
  merged.Merge(whole);
  EXPECT_TRUE(merged.has_cross());
  EXPECT_EQ(merged.cross_rank(), 0u);
  EXPECT_EQ(merged.count(), 800u);
  const auto read = MomentSummary::Deserialize(whole.Factored(4, rms).Serialize());
  ASSERT_TRUE(read.ok());
  EXPECT_EQ(read->cross_rank(), 4u);
  EXPECT_EQ(read->bytes(), sizeof(float) * (12 + 12 + 10 + 4 * (12 + 10)));
}

}  // namespace
}  // namespace prefixd
