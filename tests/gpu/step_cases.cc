#include "tests/gpu/step_cases.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <string>

#include "attention/reference/reference.h"
#include "prefixd/selection.h"
#include "tests/support/infinity.h"
#include "tests/support/test.h"

namespace prefixd::gpu::testing {
namespace {

using prefixd::testing::kInf;

struct Outputs {
  std::vector<float> y, lse, rho_z;
  Outputs(uint32_t group, uint32_t value_dim)
      : y(size_t{group} * value_dim, -7.0f), lse(group, -7.0f), rho_z(group, -7.0f) {}
  GroupStepOutput view() { return {y, lse, rho_z}; }
};

uint32_t ValueDim(const Group& group) { return group.mid.view().shape.value_dim; }

bool Estimates(const GroupStepInput& in) {
  return in.estimator != EstimatorKind::kNone && in.retrieved.count < in.mid_count;
}

// The float64 reference knows none, the moments, and phi recomputed.
bool HasReference(const GroupStepInput& in) {
  return !Estimates(in) || in.estimator == EstimatorKind::kMoment ||
         (in.estimator == EstimatorKind::kPhi && in.features.data == nullptr);
}

// What the step must agree with: the reference, or, where it has none, the CPU's step, with bounds
// on sum p|v| and |s| from the rows themselves.
reference::States Truth(const Group& group, const Outputs& cpu) {
  const uint32_t dv = ValueDim(group);
  if (HasReference(group.input)) return reference::GroupStep(group.input, dv);
  GroupStepInput exact = group.input;
  exact.estimator = EstimatorKind::kNone;
  reference::States truth = reference::GroupStep(exact, dv);
  truth.y.assign(cpu.y.begin(), cpu.y.end());
  truth.lse.assign(cpu.lse.begin(), cpu.lse.end());
  truth.rho_z.assign(cpu.rho_z.begin(), cpu.rho_z.end());
  double largest = 0;
  for (const OwnedRows* rows : {&group.sinks, &group.tail, &group.mid}) {
    for (size_t i = 0; i < rows->count(); ++i) {
      for (float v : rows->Value(i)) largest = std::max(largest, std::fabs(double{v}));
    }
  }
  std::ranges::fill(truth.abs_y, largest);
  return truth;
}

// How much rounding may move the estimate of log Z_R and y_R, in relative terms: of float32 sums,
// and of features from tensor cores; subtraction amplifies both.
double EstimateTolerance(const GroupStepInput& in, uint32_t g, double max_score) {
  if (!Estimates(in)) return 0;
  double share = 1 - static_cast<double>(in.retrieved.count) / static_cast<double>(in.mid_count);
  if (in.estimator == EstimatorKind::kPhi && in.features.data == nullptr) {
    share = reference::EstimatePhi(in, g, PhiForm::kSigned).share;
  } else if (in.estimator == EstimatorKind::kMoment) {
    share = reference::EstimateMoment(in, g).share;
  }
  const double rounding = in.estimator == EstimatorKind::kPhi ? 1e-4 : 4e-5;
  return std::min(1.0, rounding * (1 + max_score) / std::max(share, 1e-6));
}

// How far the rounding of scores moves a step: where the cut is near the remainder's mean score,
// the slope of its values is long. The outputs have differences instead of values.
Outputs Wobble(const Group& group, const reference::States& truth, const Outputs& cpu) {
  const uint32_t dv = ValueDim(group);
  Outputs most(group.input.group, dv);
  for (std::vector<float>* all : {&most.y, &most.lse, &most.rho_z}) std::ranges::fill(*all, 0.0f);
  if (!Estimates(group.input)) return most;
  for (const float sign : {-1.0f, 1.0f}) {
    std::vector<Cut> cuts(group.input.cuts.begin(), group.input.cuts.end());
    for (size_t g = 0; g < cuts.size(); ++g) {
      cuts[g].score += sign * 1e-6f * (1 + static_cast<float>(truth.max_abs_score[g]));
    }
    GroupStepInput moved = group.input;
    moved.cuts = cuts;
    Outputs other(moved.group, dv);
    if (!GroupStep(moved, other.view()).ok()) continue;
    const auto add = [](std::vector<float>& to, const std::vector<float>& a,
                        const std::vector<float>& b) {
      for (size_t i = 0; i < to.size(); ++i) to[i] = std::max(to[i], std::fabs(a[i] - b[i]));
    };
    add(most.y, other.y, cpu.y);
    add(most.lse, other.lse, cpu.lse);
    add(most.rho_z, other.rho_z, cpu.rho_z);
  }
  return most;
}

void ExpectHead(const Group& group, uint32_t g, const reference::States& truth, const Outputs& cpu,
                const Outputs& wobble, const Outputs& got) {
  SCOPED_TRACE("query head " + std::to_string(g));
  const uint32_t dv = ValueDim(group);
  if (std::isinf(truth.lse[g])) {
    EXPECT_EQ(got.lse[g], -kInf);
    EXPECT_EQ(got.rho_z[g], 0.0f);
    for (uint32_t d = 0; d < dv; ++d) EXPECT_EQ(got.y[size_t{g} * dv + d], 0.0f);
    return;
  }
  // Without an estimate, the bound that attention/step/step.h promises.
  const double exact = Estimates(group.input) ? 1e-5 + 2e-6 * truth.max_abs_score[g]
                                              : 2e-6 + 4e-7 * truth.max_abs_score[g];
  const double estimate = EstimateTolerance(group.input, g, truth.max_abs_score[g]);
  const double mass =
      exact + 1e-6 * std::fabs(truth.lse[g]) + 2 * estimate * truth.rho_z[g] + 2 * wobble.lse[g];
  EXPECT_NEAR(got.lse[g], truth.lse[g], mass);
  EXPECT_NEAR(got.lse[g], cpu.lse[g], mass);
  EXPECT_NEAR(got.rho_z[g], truth.rho_z[g],
              exact + 2 * estimate * truth.rho_z[g] + 2 * wobble.rho_z[g]);
  double scale = 0;  // values that cancel leave errors of their own size
  for (uint32_t d = 0; d < dv; ++d) scale = std::max(scale, truth.abs_y[size_t{g} * dv + d]);
  for (uint32_t d = 0; d < dv; ++d) {
    const size_t at = size_t{g} * dv + d;
    const double bound = exact * truth.abs_y[at] + 4 * estimate * truth.rho_z[g] * scale +
                         1e-7 * scale * truth.rho_z[g] + 2 * wobble.y[at] + 1e-30;
    EXPECT_NEAR(got.y[at], truth.y[at], bound) << "column " << d;
    EXPECT_NEAR(got.y[at], cpu.y[at], bound) << "column " << d;
  }
}

// Such heads are the CPU's (runtime/step/compute_cuda.cc). Where nothing is left to estimate, the
// cache is not read.
bool KeepsRowsApart(const Group& group) {
  return Estimates(group.input) && group.input.estimator == EstimatorKind::kPhi &&
         !group.input.phi->apart().empty();
}

void ExpectRefusal(const Runner& run, const Group& group) {
  Outputs result(group.input.group, ValueDim(group));
  const GroupStepOutput out = result.view();
  const Status status = run({&group.input, 1}, {&out, 1});
  ASSERT_FALSE(status.ok());
  EXPECT_EQ(status.error().code, Code::kInvalidArgument) << status.error().message;
}

}  // namespace

void ExpectAgrees(const Runner& run, std::span<const Group> all) {
  std::vector<const Group*> groups;
  for (const Group& group : all) {
    if (KeepsRowsApart(group)) {
      ExpectRefusal(run, group);
    } else {
      groups.push_back(&group);
    }
  }
  if (groups.empty()) return;
  std::vector<GroupStepInput> in;
  std::vector<Outputs> results;
  std::vector<GroupStepOutput> out;
  for (const Group* group : groups) {
    in.push_back(group->input);
    results.emplace_back(group->input.group, ValueDim(*group));
  }
  for (Outputs& result : results) out.push_back(result.view());
  const Status status = run(in, out);
  ASSERT_TRUE(status.ok()) << status.error().ToString();
  for (size_t i = 0; i < groups.size(); ++i) {
    SCOPED_TRACE("group " + std::to_string(i) + ": " + Describe(*groups[i]));
    Outputs cpu(in[i].group, ValueDim(*groups[i]));
    const Status cpu_status = GroupStep(in[i], cpu.view());
    ASSERT_TRUE(cpu_status.ok()) << cpu_status.error().ToString();
    const reference::States truth = Truth(*groups[i], cpu);
    const Outputs wobble = Wobble(*groups[i], truth, cpu);
    for (uint32_t g = 0; g < in[i].group; ++g) {
      ExpectHead(*groups[i], g, truth, cpu, wobble, results[i]);
    }
  }
}

void RandomBatches(const Runner& run, uint64_t seed, int batches, uint32_t max_dim,
                   uint32_t max_mid) {
  Random random(seed);
  for (int i = 0; i < batches; ++i) {
    SCOPED_TRACE("batch " + std::to_string(i));
    const ShapeSpec shape = RandomShape(random, max_dim);
    std::vector<Group> groups;
    const uint32_t n = random.Int(1, 4);
    for (uint32_t j = 0; j < n; ++j) {
      groups.push_back(MakeGroup(random, shape, RandomSpec(random, max_mid, shape.softcap > 0)));
    }
    ExpectAgrees(run, groups);
  }
}

void EveryForm(const Runner& run, uint64_t seed) {
  Random random(seed);
  const ShapeSpec shape{.group = 5, .row = {24, 40, DType::kBf16}, .d_phi = 20, .d_emb = 28};
  const GroupSpec base{.mid = 150, .k = 40, .cuts = CutSource::kExact};
  std::vector<GroupSpec> specs;
  const auto add = [&](EstimatorKind kind, auto change) {
    specs.push_back(base);
    specs.back().estimator = kind;
    change(specs.back());
  };
  for (const uint32_t rank : {0u, 3u}) {
    for (const bool covariance : {false, true}) {
      add(EstimatorKind::kMoment, [&](GroupSpec& s) { s.rank = rank, s.covariance = covariance; });
    }
  }
  add(EstimatorKind::kMoment, [](GroupSpec& s) { s.cross = false; });
  for (const PhiForm form : {PhiForm::kSigned, PhiForm::kPerFeature}) {
    for (const bool symmetric : {false, true}) {
      add(EstimatorKind::kPhi, [&](GroupSpec& s) { s.phi_form = form, s.symmetric = symmetric; });
      for (const uint8_t bits : {uint8_t{8}, uint8_t{16}}) {
        for (const FeatureScale scale : {FeatureScale::kLinear, FeatureScale::kLog}) {
          add(EstimatorKind::kPhi, [&](GroupSpec& s) {
            s.phi_form = form, s.symmetric = symmetric, s.stored = FeatureFormat{bits, scale};
          });
        }
      }
    }
  }
  for (const EstimatorKind kind : {EstimatorKind::kCentroid, EstimatorKind::kScan}) {
    for (const CutSource cuts : {CutSource::kNone, CutSource::kExact, CutSource::kApproximate}) {
      add(kind, [&](GroupSpec& s) {
        s.cuts = cuts, s.with_mean = cuts == CutSource::kNone, s.clusters_given = !s.with_mean;
      });
    }
    add(kind, [&](GroupSpec& s) { s.clusters = 70, s.k = 120; });
  }
  std::vector<Group> groups;
  for (const GroupSpec& spec : specs) {
    groups.push_back(MakeGroup(random, shape, spec));
    ExpectAgrees(run, std::span(&groups.back(), 1));
  }
  ExpectAgrees(run, groups);
}

void HardCases(const Runner& run, uint64_t seed) {
  Random random(seed);
  for (const EstimatorKind estimator :
       {EstimatorKind::kNone, EstimatorKind::kPhi, EstimatorKind::kMoment, EstimatorKind::kCentroid,
        EstimatorKind::kScan}) {
    SCOPED_TRACE(std::string(EstimatorName(estimator)));
    ShapeSpec shape{.group = 4, .row = {16, 16, DType::kBf16}, .d_phi = 12, .d_emb = 20};
    const auto check = [&](const char* what, const ShapeSpec& s, GroupSpec spec) {
      SCOPED_TRACE(what);
      spec.estimator = estimator;
      const Group group = MakeGroup(random, s, spec);
      ExpectAgrees(run, std::span(&group, 1));
    };
    check("nothing retrieved", shape, {.mid = 70});
    check("everything retrieved", shape, {.mid = 40, .k = 40, .cuts = CutSource::kExact});
    check("one token remains", shape, {.mid = 40, .k = 39, .cuts = CutSource::kExact});
    check("identical keys", shape,
          {.mid = 50, .k = 17, .cuts = CutSource::kExact, .identical_keys = true});
    check("no anchors", shape, {.sinks = 0, .tail = 0, .mid = 33, .k = 5});
    check("nothing exact at all", shape, {.sinks = 0, .tail = 0, .mid = 33});
    check("a prefix of one token", shape, {.sinks = 1, .tail = 0});
    check("an empty prefix", shape, {.sinks = 0, .tail = 0});
    check("one mid token", shape, {.mid = 1});
    ShapeSpec loud = shape;
    loud.query_scale = 25;  // scores up to about +-80
    check("scores of +-80", loud, {.mid = 60, .k = 12, .cuts = CutSource::kExact});
    check("scores of +-80 without a cut", loud, {.mid = 60, .k = 12});
    ShapeSpec wide = shape;
    wide.group = 16;
    wide.row = {40, 130, DType::kF32};
    check("sixteen heads, values wider than keys", wide, {.mid = 45, .k = 20});
    ShapeSpec narrow = shape;
    narrow.group = 1;
    narrow.row = {1, 1, DType::kF16};
    narrow.d_phi = narrow.d_emb = 1;
    check("one dimension", narrow, {.mid = 30, .k = 7, .cuts = CutSource::kApproximate});
  }
}

void Refusals(const Runner& run, uint64_t seed) {
  Random random(seed);
  const ShapeSpec shape{.group = 3, .row = {8, 24, DType::kF16}, .d_phi = 6, .d_emb = 9};
  const auto refuse = [&](GroupSpec spec, const std::string& expected,
                          const std::function<void(Group&)>& damage) {
    SCOPED_TRACE(expected);
    std::vector<Group> groups;
    groups.push_back(MakeGroup(random, shape, {.mid = 10, .k = 3}));
    groups.push_back(MakeGroup(random, shape, spec));
    damage(groups[1]);
    std::vector<Outputs> results(2, Outputs(shape.group, shape.row.value_dim));
    const std::vector<GroupStepInput> in = {groups[0].input, groups[1].input};
    const std::vector<GroupStepOutput> out = {results[0].view(), results[1].view()};
    const Status status = run(in, out);
    ASSERT_FALSE(status.ok());
    EXPECT_EQ(status.error().code, Code::kInvalidArgument) << status.error().ToString();
    EXPECT_NE(status.error().message.find("group 1"), std::string::npos) << status.error().message;
    EXPECT_NE(status.error().message.find(expected), std::string::npos) << status.error().message;
  };
  const auto poison = [&](OwnedRows Group::*rows, size_t row, bool value, float with) {
    return [=](Group& group) {
      std::vector<float> k = (group.*rows).Key(row), v = (group.*rows).Value(row);
      (value ? v : k).back() = with;
      (group.*rows).Set(row, k, v);
    };
  };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const GroupSpec plain{.mid = 40, .k = 20, .estimator = EstimatorKind::kMoment};
  refuse(plain, "query head 2", [&](Group& g) { g.queries[2 * 8 + 7] = nan; });
  refuse(plain, "query head 0", [&](Group& g) { g.queries[0] = -kInf; });
  refuse(plain, "sinks row 3: its key", poison(&Group::sinks, 3, false, nan));
  refuse(plain, "tail row 15: its value", poison(&Group::tail, 15, true, kInf));
  refuse(plain, "retrieved row 19: its key", poison(&Group::retrieved, 19, false, -kInf));
  refuse(plain, "retrieved row 0: its value", poison(&Group::retrieved, 0, true, nan));
  refuse(plain, "moment summary", [](Group& g) { g.input.moment = nullptr; });
  refuse(plain, "the mid region has 41", [](Group& g) { g.input.mid_count = 41; });
  refuse(plain, "NaN", [&](Group& g) {
    g.cuts.assign(3, Cut{nan, CutKind::kExact});
    g.input.cuts = g.cuts;
  });
  refuse(plain, "auto", [](Group& g) { g.input.estimator = EstimatorKind::kAuto; });
  refuse(plain, "cuts", [](Group& g) {
    g.cuts.assign(2, Cut{});
    g.input.cuts = g.cuts;
  });
  refuse(plain, "20 retrieved rows", [](Group& g) { g.input.mid_count = 5; });
  refuse({.mid = 9, .k = 2, .estimator = EstimatorKind::kPhi}, "phi",
         [](Group& g) { g.input.phi_q = g.input.phi_q.first(2); });
  const GroupSpec scan{.mid = 40, .k = 20, .estimator = EstimatorKind::kScan};
  refuse(scan, "a scan of every key", [](Group& g) { g.input.scan.complete = false; });
  refuse(scan, "cluster summary", [](Group& g) { g.input.clusters = nullptr; });
  refuse(scan, "clusters disagree", [](Group& g) {
    g.retrieved_clusters[3] = 6;
    g.input.retrieved_clusters = g.retrieved_clusters;
  });
}

void KeepsSummaries(HostStep& step, const SessionCases& cases, uint64_t seed) {
  ResidentSummaries resident(cases.most_bytes);
  auto owner = std::make_shared<int>(0);
  const auto run = [&](std::span<const GroupStepInput> in, std::span<const GroupStepOutput> out) {
    return step.Run(in, out, &resident, owner);
  };
  Random random(seed);
  GroupSpec spec{.mid = cases.mid, .k = cases.k};
  for (int session = 0; session < cases.sessions; ++session) {
    spec.estimator = static_cast<EstimatorKind>(session % kEstimatorKinds);
    const Group group = MakeGroup(random, cases.shape, spec);
    ExpectAgrees(run, std::span(&group, 1));
    const size_t bytes = resident.bytes();
    ExpectAgrees(run, std::span(&group, 1));
    EXPECT_EQ(resident.bytes(), bytes);
    EXPECT_GT(bytes, 0u);
    EXPECT_LE(bytes, cases.most_bytes);
    owner = std::make_shared<int>(session);
  }
}

}  // namespace prefixd::gpu::testing
