// Tests the names of estimators, and what each variant keeps of the gathered summary.
#include "prefixd/estimator_variant.h"

#include <cmath>
#include <string>

#include "attention/estimators/estimator.h"
#include "attention/step/budget.h"
#include "tests/attention/step_fixture.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::Random;
using testing::RandomCase;
using testing::StepCase;

TEST(EstimatorVariants, NamesAreReadBack) {
  for (const char* name : {"none", "moment", "moment/r8", "moment/full", "moment/cov",
                           "moment/r2/cov", "moment/full/cov", "phi", "phi/per_feature", "phi/bf16",
                           "phi/per_feature/bf16", "centroid", "scan", "auto"}) {
    const auto variant = EstimatorVariant::Parse(name);
    ASSERT_TRUE(variant.ok()) << name;
    EXPECT_EQ(variant->Name(), name);
  }
  for (const char* name :
       {"", "moment/", "moment/r0", "moment/r", "moment/r8x", "moment/r99999", "moment/r2/r4",
        "moment/full/full", "moment/cov/cov", "moment/r8/rank", "none/r8", "phi/cov", "scan/r8",
        "centroid/", "centroid/cov", "Moment", "moment/r-1", "phi/bf16/bf16", "/r8"}) {
    const auto variant = EstimatorVariant::Parse(name);
    ASSERT_FALSE(variant.ok()) << name;
    EXPECT_EQ(variant.error().code, Code::kInvalidArgument);
    EXPECT_NE(variant.error().message.find("known: none, moment"), std::string::npos);
  }
  const auto list = ParseVariants("none,moment/r8 ,  scan");
  ASSERT_TRUE(list.ok());
  EXPECT_EQ(VariantNames(*list), "none, moment/r8, scan");
  for (const char* bad : {"", "none,,scan", "moment,auto", "scan, scan", "none, nothing"}) {
    EXPECT_FALSE(ParseVariants(bad).ok()) << bad;
  }
}

// Each variant keeps what it costs, survives storage, and estimates as the whole summary does.
TEST(EstimatorVariants, KeepWhatTheyCost) {
  Random random(testing::Seed("EstimatorVariants.Keep"));
  for (int round = 0; round < 20; ++round) {
    const RowShape shape{random.Int(5, 20), random.Int(5, 12), random.AnyDType()};
    StepCase c = RandomCase(random, random.Int(60, 200), shape, {2, 3}, random.Int(1, 4), 1.0);
    c.BuildPhi(random, 6, 10);
    c.RetrieveTop(random.Int(0, 30));
    const Clustering clustering = Clustering::Fit(c.Mid(), 5);
    const auto gather = [&](EstimatorKind kind) {
      auto summary = EstimatorSummary::Create(
          {kind, shape.key_dim, shape.value_dim, true, true, &c.phi_k, &clustering});
      EXPECT_TRUE(summary.ok());
      summary->Add(c.Mid());
      return std::move(summary).value();
    };
    const EstimatorSummary moment = gather(EstimatorKind::kMoment);
    const EstimatorSummary phi = gather(EstimatorKind::kPhi);
    const EstimatorSummary clusters = gather(EstimatorKind::kCentroid);
    for (const char* name :
         {"none", "moment", "moment/r2", "moment/full", "moment/cov", "moment/r3/cov",
          "moment/r900", "phi", "phi/bf16", "centroid", "scan"}) {
      SCOPED_TRACE(name);
      const EstimatorVariant variant = *EstimatorVariant::Parse(name);
      const EstimatorSummary& all = variant.kind == EstimatorKind::kPhi ? phi
                                    : variant.clustered()               ? clusters
                                                                        : moment;
      const auto kept = all.Keep(variant, {}, nullptr);
      ASSERT_TRUE(kept.ok()) << kept.error().message;
      EXPECT_EQ(kept->kind(), variant.kind);
      EXPECT_NEAR(kept->Tokens(shape), VariantTokens(variant, shape, 10, 5), 1e-9);
      if (variant.kind == EstimatorKind::kNone) continue;
      EXPECT_EQ(kept->count(), c.Mid().count);
      // The directions are found again, or given; both must agree.
      const auto again = all.Keep(variant, {}, &*kept);
      ASSERT_TRUE(again.ok());
      GroupStepInput in = c.Input(EstimatorKind::kNone);
      in.phi_q = c.phi_q;
      std::vector<float> masses, scores, retrieved_scores;
      if (variant.kind == EstimatorKind::kScan) {
        scores.resize(c.group * c.Mid().count);
        Scores(c.queries, c.group, c.layer, c.Mid(), scores);
        masses.resize(size_t{c.group} * clustering.size());
        SumScan(scores, c.group, clustering.Assign(c.Mid()), c.cuts, clustering.size(), masses);
        retrieved_scores.resize(c.group * c.ids.size());
        Scores(c.queries, c.group, c.layer, c.retrieved.view(), retrieved_scores);
        in.scan = {masses, retrieved_scores, true};
      }
      testing::StepOutput a = c.Buffers(), b = c.Buffers();
      kept->AttachTo(in);
      ASSERT_TRUE(GroupStep(in, a.spans()).ok());
      again->AttachTo(in);
      ASSERT_TRUE(GroupStep(in, b.spans()).ok());
      for (size_t i = 0; i < a.y.size(); ++i) EXPECT_NEAR(a.y[i], b.y[i], 1e-4);
      for (size_t g = 0; g < c.group; ++g) {
        EXPECT_NEAR(a.lse[g], b.lse[g], 1e-4);
        EXPECT_GE(a.rho_z[g], 0);
        EXPECT_LE(a.rho_z[g], 1);
      }
      // Without the merge, the step still reports the estimate, and uses nothing else of it.
      in.merge_estimate = false;
      testing::StepOutput apart = c.Buffers(), none = c.Buffers();
      ASSERT_TRUE(GroupStep(in, apart.spans()).ok());
      in.estimator = EstimatorKind::kNone;
      ASSERT_TRUE(GroupStep(in, none.spans()).ok());
      EXPECT_EQ(apart.y, none.y);
      EXPECT_EQ(apart.lse, none.lse);
      for (size_t g = 0; g < c.group; ++g) EXPECT_NEAR(apart.rho_z[g], b.rho_z[g], 1e-5);
    }
    // A summary that holds too little is an error, not a guess.
    const auto plain = moment.Keep(EstimatorKind::kMoment, {}, nullptr);
    ASSERT_TRUE(plain.ok());
    for (const char* more : {"moment/r2", "moment/full", "moment/cov", "phi", "scan"}) {
      const auto refused = plain->Keep(*EstimatorVariant::Parse(more), {}, nullptr);
      ASSERT_FALSE(refused.ok()) << more;
      EXPECT_EQ(refused.error().code, Code::kInvalidArgument);
    }
    EXPECT_FALSE(clusters.Keep(EstimatorKind::kScan, {}, nullptr)
                     ->Keep(EstimatorKind::kCentroid, {}, nullptr)
                     .ok());
    auto factored = moment.Keep(*EstimatorVariant::Parse("moment/r2"), {}, nullptr);
    ASSERT_TRUE(factored.ok());
    EXPECT_FALSE(factored->Merge(*factored).ok());
  }
}

// Joined clusters equal the clusters of a coarser partition, whatever the pieces.
TEST(EstimatorVariants, CoarsenedClustersEqualThoseBuiltCoarse) {
  Random random(testing::Seed("EstimatorVariants.Coarsen"));
  const RowShape shape{8, 6, DType::kF32};
  const StepCase c = RandomCase(random, 120, shape, {}, 2, 1.0);
  const Clustering fine = Clustering::Fit(c.Mid(), 9), coarse = Clustering::Fit(c.Mid(), 3);
  std::vector<uint16_t> to;
  for (uint32_t f = 0; f < fine.size(); ++f) to.push_back(static_cast<uint16_t>(f % 3));
  ClusterSummary parts(fine.size(), 8, 6, ClusterContents::kCentroids);
  std::vector<uint16_t> assigned = fine.Assign(c.Mid());
  parts.Add(c.Mid(), assigned);
  for (uint16_t& a : assigned) a = to[a];
  ClusterSummary want(3, 8, 6, ClusterContents::kCentroids);
  want.Add(c.Mid(), assigned);
  const ClusterSummary got = parts.Coarsened(to, 3);
  EXPECT_EQ(got.count(), want.count());
  for (uint32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(got.counts()[i], want.counts()[i]);
    EXPECT_NEAR(got.spreads()[i], want.spreads()[i], 8e-9);
  }
  for (size_t i = 0; i < want.mean_keys().size(); ++i) {
    EXPECT_NEAR(got.mean_keys()[i], want.mean_keys()[i], 1e-12);
  }
  for (size_t i = 0; i < want.mean_values().size(); ++i) {
    EXPECT_NEAR(got.mean_values()[i], want.mean_values()[i], 1e-12);
  }
  auto summary =
      EstimatorSummary::Create({EstimatorKind::kCentroid, 8, 6, false, false, nullptr, &fine});
  ASSERT_TRUE(summary.ok());
  EXPECT_FALSE(summary->Coarsen(std::vector<uint16_t>(9, 3), &coarse).ok());
  EXPECT_FALSE(summary->Coarsen(std::vector<uint16_t>(8, 0), &coarse).ok());
  EXPECT_TRUE(summary->Coarsen(to, &coarse).ok());
}

}  // namespace
}  // namespace prefixd
