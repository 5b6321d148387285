#include "tests/gpu/step_cases.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

#include "attention/reference.h"
#include "attention/selection.h"
#include "tests/support/test.h"

namespace prefixd::gpu::testing {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Outputs {
  std::vector<float> y, lse, rho_z;
  Outputs(uint32_t group, uint32_t value_dim)
      : y(size_t{group} * value_dim, -7.0f), lse(group, -7.0f), rho_z(group, -7.0f) {}
  GroupStepOutput view() { return {y, lse, rho_z}; }
};

uint32_t ValueDim(const Group& group) { return group.mid.view().shape.value_dim; }

// How much float32 rounding may move the estimate of log Z_R and y_R, in relative terms.
double EstimateTolerance(const GroupStepInput& in, uint32_t g, double max_score) {
  if (in.estimator == EstimatorKind::kNone || in.retrieved.count == in.mid_count) return 0;
  const double share = in.estimator == EstimatorKind::kPhi
                           ? reference::EstimatePhi(in, g, reference::PhiForm::kSigned).share
                           : reference::EstimateMoment(in, g).share;
  return std::min(1.0, 4e-5 * (1 + max_score) / std::max(share, 1e-6));
}

void ExpectHead(const Group& group, uint32_t g, const reference::States& truth, const Outputs& cpu,
                const Outputs& got) {
  SCOPED_TRACE("query head " + std::to_string(g));
  const uint32_t dv = ValueDim(group);
  if (std::isinf(truth.lse[g])) {
    EXPECT_EQ(got.lse[g], -kInf);
    EXPECT_EQ(got.rho_z[g], 0.0f);
    for (uint32_t d = 0; d < dv; ++d) EXPECT_EQ(got.y[size_t{g} * dv + d], 0.0f);
    return;
  }
  const double exact = 1e-5 + 2e-6 * truth.max_abs_score[g];
  const double estimate = EstimateTolerance(group.input, g, truth.max_abs_score[g]);
  EXPECT_NEAR(got.lse[g], truth.lse[g],
              exact + 1e-6 * std::fabs(truth.lse[g]) + 2 * estimate * truth.rho_z[g]);
  EXPECT_NEAR(got.rho_z[g], truth.rho_z[g], exact + 2 * estimate * truth.rho_z[g]);
  EXPECT_NEAR(got.lse[g], cpu.lse[g],
              exact + 1e-6 * std::fabs(truth.lse[g]) + 2 * estimate * truth.rho_z[g]);
  double scale = 0;  // values that cancel leave errors of their own size
  for (uint32_t d = 0; d < dv; ++d) scale = std::max(scale, truth.abs_y[size_t{g} * dv + d]);
  for (uint32_t d = 0; d < dv; ++d) {
    const size_t at = size_t{g} * dv + d;
    const double bound = exact * truth.abs_y[at] + 4 * estimate * truth.rho_z[g] * scale + 1e-7;
    EXPECT_NEAR(got.y[at], truth.y[at], bound) << "column " << d;
    EXPECT_NEAR(got.y[at], cpu.y[at], bound) << "column " << d;
  }
}

std::string Describe(const Group& group) {
  const GroupStepInput& in = group.input;
  const RowShape row = group.mid.view().shape;
  return "G " + std::to_string(in.group) + ", dims " + std::to_string(row.key_dim) + "+" +
         std::to_string(row.value_dim) + " " + std::string(DTypeName(row.dtype)) + ", rows " +
         std::to_string(in.sinks.count) + "+" + std::to_string(in.tail.count) + "+" +
         std::to_string(in.retrieved.count) + ", mid " + std::to_string(in.mid_count) +
         ", estimator " + std::string(EstimatorName(in.estimator));
}

GroupSpec RandomSpec(Random& random, uint32_t max_mid, bool softcap) {
  GroupSpec spec;
  spec.sinks = random.Int(0, 5);
  spec.tail = random.Int(0, 17);
  spec.mid = random.Int(0, max_mid);
  spec.k = random.Chance(0.2) ? 0 : random.Int(0, spec.mid);
  if (!softcap) spec.estimator = static_cast<EstimatorKind>(random.Int(0, 2));
  spec.cuts = static_cast<CutSource>(random.Int(0, 2));
  spec.cross = random.Chance(0.7);
  spec.moment_with_phi = random.Chance(0.5);
  return spec;
}

}  // namespace

ShapeSpec RandomShape(Random& random, uint32_t max_dim) {
  ShapeSpec shape;
  shape.group = random.Chance(0.2) ? 16 : random.Int(1, 9);
  shape.row.key_dim = random.Int(1, max_dim);
  shape.row.value_dim = random.Chance(0.5) ? shape.row.key_dim : random.Int(1, max_dim);
  shape.row.dtype = random.AnyDType();
  shape.d_phi = random.Int(1, max_dim);
  shape.d_emb = random.Int(1, max_dim);
  if (random.Chance(0.2)) shape.softcap = static_cast<float>(random.Uniform(1, 30));
  return shape;
}

void Group::Bind(const ShapeSpec& shape, EstimatorKind estimator) {
  input.queries = queries;
  input.group = shape.group;
  input.layer = {1 / std::sqrt(static_cast<float>(shape.row.key_dim)), shape.softcap, 0};
  input.sinks = sinks.view();
  input.tail = tail.view();
  input.retrieved = retrieved.view();
  input.cuts = cuts;
  input.mid_count = mid.count();
  input.estimator = estimator;
  input.moment = moment.get();
  input.phi = phi.get();
  input.phi_q = phi_q;
  input.phi_k = phi_k.get();
}

Group MakeGroup(Random& random, const ShapeSpec& shape, const GroupSpec& spec) {
  using prefixd::testing::RandomFeatureMap;
  using prefixd::testing::RandomRows;
  const uint32_t dh = shape.row.key_dim;
  Group group;
  group.queries = random.Normals(size_t{shape.group} * dh, shape.query_scale);
  group.sinks = RandomRows(random, shape.row, spec.sinks);
  group.tail = RandomRows(random, shape.row, spec.tail);
  group.mid = RandomRows(random, shape.row, spec.mid);
  if (spec.identical_keys && spec.mid > 0) {
    const std::vector<float> key = group.mid.Key(0);
    for (uint32_t i = 1; i < spec.mid; ++i) group.mid.Set(i, key, group.mid.Value(i));
  }
  group.Bind(shape, spec.estimator);

  std::vector<float> scores(size_t{shape.group} * spec.mid);
  Scores(group.queries, shape.group, group.input.layer, group.mid.view(), scores);
  Selection selection = SelectByGroupMax(scores, shape.group, spec.mid, spec.k, 0,
                                         spec.cuts != CutSource::kApproximate);
  group.retrieved = group.mid.Pick(selection.ids);
  if (spec.cuts != CutSource::kNone) group.cuts = selection.cuts;

  const bool phi = spec.estimator == EstimatorKind::kPhi;
  if (spec.estimator == EstimatorKind::kMoment || (phi && spec.moment_with_phi)) {
    group.moment = std::make_unique<MomentSummary>(dh, shape.row.value_dim, spec.cross);
    group.moment->Add(group.mid.view());
  }
  if (phi) {
    group.phi_k =
        std::make_unique<FeatureMap>(RandomFeatureMap(random, dh, shape.d_emb, shape.d_phi));
    for (uint32_t g = 0; g < shape.group; ++g) {
      group.phi_q.push_back(RandomFeatureMap(random, dh, shape.d_emb, shape.d_phi));
    }
    group.phi = std::make_unique<PhiCache>(shape.d_phi, shape.row.value_dim);
    group.phi->Add(group.mid.view(), *group.phi_k);
  }
  group.Bind(shape, spec.estimator);
  return group;
}

void ExpectAgrees(const Runner& run, std::span<const Group> groups) {
  std::vector<GroupStepInput> in;
  std::vector<Outputs> results;
  std::vector<GroupStepOutput> out;
  for (const Group& group : groups) {
    in.push_back(group.input);
    results.emplace_back(group.input.group, ValueDim(group));
  }
  for (Outputs& result : results) out.push_back(result.view());
  const Status status = run(in, out);
  ASSERT_TRUE(status.ok()) << status.error().ToString();
  for (size_t i = 0; i < groups.size(); ++i) {
    SCOPED_TRACE("group " + std::to_string(i) + ": " + Describe(groups[i]));
    const reference::States truth = reference::GroupStep(in[i], ValueDim(groups[i]));
    Outputs cpu(in[i].group, ValueDim(groups[i]));
    const Status cpu_status = GroupStep(in[i], cpu.view());
    ASSERT_TRUE(cpu_status.ok()) << cpu_status.error().ToString();
    for (uint32_t g = 0; g < in[i].group; ++g) ExpectHead(groups[i], g, truth, cpu, results[i]);
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

void HardCases(const Runner& run, uint64_t seed) {
  Random random(seed);
  for (const EstimatorKind estimator :
       {EstimatorKind::kNone, EstimatorKind::kPhi, EstimatorKind::kMoment}) {
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
  refuse(plain, "disagree", [](Group& g) { g.input.mid_count = 41; });
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
}

}  // namespace prefixd::gpu::testing
