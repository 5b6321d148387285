// Tests all estimators behind their one interface: the contract that every one must meet, and the
// cases that are exact.
#include "attention/estimators/estimator.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "tests/attention/step_fixture.h"
#include "tests/support/infinity.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd {
namespace {

using testing::OwnedRows;
using testing::Random;
using testing::RandomCase;
using testing::StepCase;

using testing::kInf;

// One way to estimate, with everything that it borrows.
struct Method {
  std::string name;
  EstimatorSpec spec;
  PhiForm phi_form = PhiForm::kSigned;
  bool symmetric = false;
};

std::vector<Method> Methods(const StepCase& c, const Clustering& clustering) {
  const uint32_t dk = c.shape().key_dim, dv = c.shape().value_dim;
  const auto moment = [&](bool cross, bool covariance) {
    return EstimatorSpec{EstimatorKind::kMoment, dk, dv, cross, covariance, nullptr, nullptr};
  };
  const auto other = [&](EstimatorKind kind) {
    return EstimatorSpec{kind, dk, dv, false, false, &c.phi_k, &clustering};
  };
  return {{"moment", moment(false, false)},
          {"moment cross", moment(true, false)},
          {"moment covariance", moment(true, true)},
          {"phi", other(EstimatorKind::kPhi)},
          {"phi per feature", other(EstimatorKind::kPhi), PhiForm::kPerFeature},
          {"phi symmetric", other(EstimatorKind::kPhi), PhiForm::kSigned, true},
          {"centroid", other(EstimatorKind::kCentroid)},
          {"scan", other(EstimatorKind::kScan)}};
}

EstimatorSummary Build(const EstimatorSpec& spec, const RowsView& rows) {
  auto summary = EstimatorSummary::Create(spec);
  EXPECT_TRUE(summary.ok());
  summary->Add(rows);
  return std::move(summary).value();
}

struct Estimates {
  std::vector<float> log_z, y;
};

// Estimates `mid` less `retrieved` through the interface.
Estimates Evaluate(const StepCase& c, const Method& method, const EstimatorSummary& summary,
                   const RowsView& mid, const RowsView& retrieved, std::span<const Cut> cuts) {
  GroupStepInput in;
  in.queries = c.queries;
  in.group = c.group;
  in.layer = c.layer;
  in.retrieved = retrieved;
  in.cuts = cuts;
  in.mid_count = mid.count;
  in.phi_form = method.phi_form;
  if (!method.symmetric) in.phi_q = c.phi_q;
  summary.AttachTo(in);
  std::vector<float> log_mass, retrieved_scores, scores(c.group * mid.count);
  if (method.spec.kind == EstimatorKind::kScan) {
    const uint32_t n = method.spec.clustering->size();
    Scores(c.queries, c.group, c.layer, mid, scores);
    log_mass.resize(size_t{c.group} * n);
    SumScan(scores, c.group, method.spec.clustering->Assign(mid), cuts, n, log_mass);
    retrieved_scores.resize(c.group * retrieved.count);
    Scores(c.queries, c.group, c.layer, retrieved, retrieved_scores);
    in.scan = {log_mass, retrieved_scores, true};
  }
  Estimates out{std::vector<float>(c.group),
                std::vector<float>(size_t{c.group} * c.shape().value_dim)};
  const Status status = EstimateRemainder(in, out.log_z, out.y);
  EXPECT_TRUE(status.ok()) << method.name << ": " << (status.ok() ? "" : status.error().message);
  return out;
}

StepCase AnyCase(Random& random, uint32_t n) {
  const RowShape shape{random.Int(2, 20), random.Int(1, 12), random.AnyDType()};
  StepCase c = RandomCase(random, n, shape, {2, 3}, random.Int(1, 5), random.Uniform(0.2, 2));
  c.BuildPhi(random, 6, 10);
  return c;
}

// One-way subtraction: the summary of M less K must estimate like the summary of M
// K.
TEST(Estimators, SubtractingRetrievedRowsIsAsIfTheyHadNeverBeenAdded) {
  Random random(testing::Seed("Estimators.Subtract"));
  for (int round = 0; round < 40; ++round) {
    StepCase c = AnyCase(random, random.Int(60, 200));
    c.RetrieveTop(random.Int(0, c.parts.mid.size() / 3));
    const Clustering clustering = Clustering::Fit(c.Mid(), 5);
    const OwnedRows rest = c.Rest();
    const RowsView none{nullptr, 0, 0, c.shape()};
    for (const Method& method : Methods(c, clustering)) {
      SCOPED_TRACE(method.name + ", round " + std::to_string(round));
      const Estimates got =
          Evaluate(c, method, Build(method.spec, c.Mid()), c.Mid(), c.retrieved.view(), c.cuts);
      const Estimates want =
          Evaluate(c, method, Build(method.spec, rest.view()), rest.view(), none, c.cuts);
      double share = 1;  // removing retrieved rows amplifies phi's rounding
      if (method.spec.kind == EstimatorKind::kPhi && !method.symmetric) {
        c.phi = PhiCache(c.phi_k.d_phi, c.shape().value_dim);
        c.phi.Add(c.Mid(), c.phi_k);
        for (uint32_t g = 0; g < c.group; ++g) {
          share = std::min(
              share,
              reference::EstimatePhi(c.Input(EstimatorKind::kPhi), g, PhiForm::kSigned).share);
        }
      }
      if (share < 1e-2 || (method.symmetric && c.ids.size() > 0)) continue;
      for (uint32_t g = 0; g < c.group; ++g) {
        EXPECT_NEAR(got.log_z[g], want.log_z[g], 2e-4 / share) << "head " << g;
        for (uint32_t l = 0; l < c.shape().value_dim; ++l) {
          const size_t at = size_t{g} * c.shape().value_dim + l;
          EXPECT_NEAR(got.y[at], want.y[at], 1e-3 / share) << "head " << g;
        }
      }
    }
  }
}

TEST(Estimators, MergeInAnyPiecesAndComeBackFromStorage) {
  Random random(testing::Seed("Estimators.Merge"));
  for (int round = 0; round < 20; ++round) {
    StepCase c = AnyCase(random, 150);
    c.RetrieveTop(20);
    const Clustering clustering = Clustering::Fit(c.Mid(), 4);
    const size_t cut = random.Int(0, c.parts.mid.size());
    for (const Method& method : Methods(c, clustering)) {
      SCOPED_TRACE(method.name);
      const EstimatorSummary whole = Build(method.spec, c.Mid());
      EstimatorSummary merged = Build(method.spec, c.Mid().Sub(0, 0));
      ASSERT_TRUE(merged.Merge(Build(method.spec, c.Mid().Sub(0, cut))).ok());
      ASSERT_TRUE(merged.Merge(Build(method.spec, c.Mid().Sub(cut, c.Mid().count - cut))).ok());
      ASSERT_TRUE(merged.Merge(Build(method.spec, c.Mid().Sub(0, 0))).ok());
      EXPECT_EQ(merged.count(), c.Mid().count);
      EXPECT_EQ(merged.bytes(), whole.bytes());
      EXPECT_NEAR(merged.Tokens(c.shape()), double(merged.bytes()) / double(c.shape().bytes()),
                  1e-12);
      const auto bytes = merged.Serialize("maker 1");
      auto read = EstimatorSummary::Deserialize(method.spec, "maker 1", bytes);
      ASSERT_TRUE(read.ok()) << read.error().message;
      const Estimates a = Evaluate(c, method, whole, c.Mid(), c.retrieved.view(), c.cuts);
      const Estimates b = Evaluate(c, method, *read, c.Mid(), c.retrieved.view(), c.cuts);
      for (size_t i = 0; i < a.log_z.size(); ++i) EXPECT_NEAR(a.log_z[i], b.log_z[i], 2e-3);
      for (size_t i = 0; i < a.y.size(); ++i) EXPECT_NEAR(a.y[i], b.y[i], 1e-2);

      auto foreign = EstimatorSummary::Deserialize(method.spec, "maker 2", bytes);
      ASSERT_FALSE(foreign.ok());
      EXPECT_EQ(foreign.error().code, Code::kFailedPrecondition);
      for (size_t length : {size_t{0}, size_t{10}, bytes.size() / 2, bytes.size() - 1}) {
        auto cut_short =
            EstimatorSummary::Deserialize(method.spec, "maker 1", std::span(bytes).first(length));
        ASSERT_FALSE(cut_short.ok());
        EXPECT_EQ(cut_short.error().code, Code::kCorrupt);
      }
    }
  }
}

TEST(Estimators, RefuseWhatDoesNotBelongTogether) {
  Random random(testing::Seed("Estimators.Refuse"));
  StepCase c = AnyCase(random, 80);
  const Clustering clustering = Clustering::Fit(c.Mid(), 3);
  const std::vector<Method> methods = Methods(c, clustering);
  EstimatorSummary moment = Build(methods[0].spec, c.Mid());
  EXPECT_FALSE(moment.Merge(Build(methods[3].spec, c.Mid())).ok());
  EXPECT_FALSE(moment.Merge(Build(methods[1].spec, c.Mid())).ok());
  for (EstimatorKind kind : {EstimatorKind::kPhi, EstimatorKind::kCentroid, EstimatorKind::kAuto}) {
    EXPECT_FALSE(EstimatorSummary::Create({kind, 4, 4}).ok());
  }
  // A step names the missing part.
  GroupStepInput in = c.Input(EstimatorKind::kNone);
  const EstimatorSummary scan = Build(methods[7].spec, c.Mid());
  scan.AttachTo(in);
  testing::StepOutput out = c.Buffers();
  Status status = GroupStep(in, out.spans());
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("pruned"), std::string::npos);
  const EstimatorSummary centroid = Build(methods[6].spec, c.Mid().Sub(0, 10));
  centroid.AttachTo(in);
  status = GroupStep(in, out.spans());
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("10 tokens"), std::string::npos);
  scan.AttachTo(in);
  in.estimator = EstimatorKind::kCentroid;
  status = GroupStep(in, out.spans());
  ASSERT_FALSE(status.ok());
  EXPECT_NE(status.error().message.find("too little"), std::string::npos);
}

// Version 1 could hold the moments of clusters, too, as contents 3.
TEST(Estimators, ClustersOfAnotherVersionAreRefused) {
  Random random(testing::Seed("Estimators.ClusterVersion"));
  const StepCase c = AnyCase(random, 80);
  const Clustering clustering = Clustering::Fit(c.Mid(), 3);
  ClusterSummary summary(3, c.shape().key_dim, c.shape().value_dim, ClusterContents::kCentroids);
  summary.Add(c.Mid(), clustering.Assign(c.Mid()));
  const std::vector<std::byte> good = summary.Serialize();
  ASSERT_TRUE(ClusterSummary::Deserialize(good).ok());
  const std::pair<size_t, uint8_t> edits[] = {{4, 1}, {4, 3}, {6, 0}, {6, 1}, {6, 3}};
  for (const auto& [at, value] : edits) {
    std::vector<std::byte> bytes = good;
    bytes[at] = std::byte{value};
    const auto refused = ClusterSummary::Deserialize(bytes);
    ASSERT_FALSE(refused.ok()) << at << " " << int{value};
    EXPECT_EQ(refused.error().code, Code::kCorrupt);
  }
}

// Bounds the error that float32 scores and values of retrieved rows cause in the means of the rest
// of a cluster: every retrieved row adds its rounding, and the rows left share it.
double RoundingOfMeans(const StepCase& c, const Clustering& clustering, uint32_t g) {
  const RowsView retrieved = c.retrieved.view();
  std::vector<double> left(clustering.size()), rounding(clustering.size());
  for (const uint16_t cluster : clustering.Assign(c.Mid())) left[cluster] += 1;
  const std::vector<uint16_t> taken = clustering.Assign(retrieved);
  const size_t dk = c.shape().key_dim;
  std::vector<float> key(dk);
  for (size_t i = 0; i < retrieved.count; ++i) {
    ToFloat(c.shape().dtype, retrieved.key(i), key);
    double magnitude = 0;
    for (size_t j = 0; j < dk; ++j) {
      magnitude += std::abs(double{c.layer.scale} * c.queries[g * dk + j] * key[j]);
    }
    left[taken[i]] -= 1;
    rounding[taken[i]] += 4e-7 * (1 + magnitude);
  }
  double most = 0;
  for (uint32_t k = 0; k < clustering.size(); ++k) {
    if (left[k] >= 1) most = std::max(most, rounding[k] / left[k]);
  }
  return most;
}

TEST(Estimators, ClustersMatchTheReference) {
  Random random(testing::Seed("Estimators.ClusterReference"));
  for (int round = 0; round < 200; ++round) {
    StepCase c = AnyCase(random, random.Int(40, 200));
    c.RetrieveTop(random.Int(0, c.parts.mid.size() - 1));
    if (random.Chance(0.3)) c.cuts.assign(c.group, {kInf, CutKind::kNone});
    if (random.Chance(0.3)) {
      for (Cut& cut : c.cuts) cut.kind = CutKind::kApproximate;
    }
    const Clustering clustering = Clustering::Fit(c.Mid(), random.Int(1, 12));
    const OwnedRows rest = c.Rest();
    for (const Method& method : Methods(c, clustering)) {
      if (method.spec.clustering == nullptr || method.spec.kind == EstimatorKind::kPhi) continue;
      SCOPED_TRACE(method.name + ", round " + std::to_string(round));
      const EstimatorSummary summary = Build(method.spec, c.Mid());
      const Estimates got = Evaluate(c, method, summary, c.Mid(), c.retrieved.view(), c.cuts);
      GroupStepInput in = c.Input(EstimatorKind::kNone);
      summary.AttachTo(in);
      for (uint32_t g = 0; g < c.group; ++g) {
        const reference::Estimate want = reference::EstimateClusters(in, g, rest.view());
        const double rounding = RoundingOfMeans(c, clustering, g);
        // A scan's masses are float32, too; the rest of a mass has the error of the whole.
        double mass = 0;
        if (method.spec.kind == EstimatorKind::kScan) {
          mass = 1e-5 * std::exp(reference::EstimateClusters(in, g, c.Mid()).log_z - want.log_z);
          if (mass > 0.1) continue;  // next to nothing is left
        }
        ASSERT_NEAR(got.log_z[g], want.log_z,
                    2 * mass + rounding + 1e-4 * (1 + std::abs(want.log_z)));
        for (uint32_t l = 0; l < c.shape().value_dim; ++l) {
          ASSERT_NEAR(got.y[size_t{g} * c.shape().value_dim + l], want.y[l],
                      (1e-3 + 4 * rounding + 10 * mass) * (1 + std::abs(want.y[l])));
        }
      }
    }
  }
}

// With a cluster for every token, centroids and scans know the remainder exactly.
TEST(Estimators, ClustersOfOneTokenAreExact) {
  Random random(testing::Seed("Estimators.Exact"));
  for (int round = 0; round < 20; ++round) {
    StepCase c = AnyCase(random, 60);
    c.Retrieve(testing::RandomSubset(random, c.parts.mid.begin, c.parts.mid.end, 15));
    c.cuts.assign(c.group, {kInf, CutKind::kNone});
    const Clustering clustering = Clustering::Fit(c.Mid(), c.parts.mid.size(), 0);
    const OwnedRows rest = c.Rest();
    const reference::States truth =
        reference::ExactAttention(c.queries, c.group, c.layer, rest.view());
    for (const Method& method : Methods(c, clustering)) {
      if (method.spec.clustering == nullptr || method.spec.kind == EstimatorKind::kPhi) continue;
      SCOPED_TRACE(method.name);
      const Estimates got =
          Evaluate(c, method, Build(method.spec, c.Mid()), c.Mid(), c.retrieved.view(), c.cuts);
      for (uint32_t g = 0; g < c.group; ++g) EXPECT_NEAR(got.log_z[g], truth.lse[g], 1e-4);
      for (size_t at = 0; at < got.y.size(); ++at) EXPECT_NEAR(got.y[at], truth.y[at], 1e-3);
    }
  }
}

// Where a cut passes a cluster's mean, its estimate does not drop.
TEST(Estimators, AHigherCutNeverLowersTheMassOfClusters) {
  Random random(testing::Seed("Estimators.CutOverClusters"));
  for (int round = 0; round < 20; ++round) {
    StepCase c = AnyCase(random, 120);
    c.RetrieveTop(10);
    const Clustering clustering = Clustering::Fit(c.Mid(), 6);
    for (const Method& method : Methods(c, clustering)) {
      if (method.spec.kind != EstimatorKind::kCentroid) continue;
      SCOPED_TRACE(method.name);
      const EstimatorSummary summary = Build(method.spec, c.Mid());
      std::vector<float> before(c.group, -kInf);
      for (int step = -300; step <= 300; ++step) {
        const float cut = static_cast<float>(step) / 50;
        const Estimates got = Evaluate(c, method, summary, c.Mid(), c.retrieved.view(),
                                       std::vector<Cut>(c.group, {cut, CutKind::kExact}));
        for (uint32_t g = 0; g < c.group; ++g) {
          EXPECT_GE(got.log_z[g], before[g] - 1e-4) << "cut " << cut;
          before[g] = got.log_z[g];
        }
      }
    }
  }
}

TEST(Estimators, TheBracketGuardsEveryOne) {
  Random random(testing::Seed("Estimators.Bracket"));
  for (int round = 0; round < 20; ++round) {
    StepCase c = AnyCase(random, 120);
    c.RetrieveTop(10);
    const Clustering clustering = Clustering::Fit(c.Mid(), 4);
    const double r = static_cast<double>(c.parts.mid.size() - c.ids.size());
    const float cut = c.cuts[0].score - 1.5f;  // tighter than true: every estimate must obey it
    const std::vector<Cut> cuts(c.group, {cut, CutKind::kExact});
    const OwnedRows rest = c.Rest();
    for (const Method& method : Methods(c, clustering)) {
      SCOPED_TRACE(method.name);
      const Estimates got =
          Evaluate(c, method, Build(method.spec, c.Mid()), c.Mid(), c.retrieved.view(), cuts);
      for (uint32_t g = 0; g < c.group; ++g) {
        double mean = 0;
        for (double s : reference::Scores(
                 std::span(c.queries).subspan(size_t{g} * c.shape().key_dim, c.shape().key_dim),
                 c.layer, rest.view())) {
          mean += s / r;
        }
        const double upper = std::log(r) + std::max(double{cut}, mean);
        EXPECT_LE(got.log_z[g], upper + 1e-3);
        if (method.spec.kind != EstimatorKind::kPhi && method.spec.kind != EstimatorKind::kScan) {
          EXPECT_GE(got.log_z[g], std::log(r) + mean - 1e-3);
        }
      }
    }
  }
}

}  // namespace
}  // namespace prefixd
