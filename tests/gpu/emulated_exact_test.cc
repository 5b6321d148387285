// Exact attention's kernels on emulated blocks.
#include <vector>

#include "gpu/exact_layout.h"
#include "tests/gpu/emulated_cuda.h"
#include "tests/gpu/exact_cases.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::gpu {
namespace {

using testing::ExactCase;
using testing::ExactResult;

DeviceInfo FakeDevice(int multiprocessors) {
  DeviceInfo device;
  device.name = "an emulated device";
  device.multiprocessors = multiprocessors;
  device.shared_bytes_max = emulated::kDynamicSharedBytes;
  return device;
}

Result<ExactResult> Emulated(const ExactCase& c) {
  PREFIXD_ASSIGN(const ExactPlan plan, PlanExact(c.shape, FakeDevice(3)));
  std::vector<ExactSource> sources;
  std::vector<std::vector<DeviceRow>> addresses(c.groups.size());
  for (size_t i = 0; i < c.groups.size(); ++i) {
    const RowsView rows = c.groups[i].rows.view();
    ExactSource source;
    source.queries = c.groups[i].queries.data();
    source.n_queries = static_cast<uint32_t>(c.groups[i].queries.size() / c.shape.row.key_dim);
    source.count = static_cast<uint32_t>(rows.count);
    source.rows = rows.data;
    source.row_stride = rows.stride;
    for (size_t r = 0; r < rows.count; ++r) addresses[i].push_back({rows.key(r), rows.value(r)});
    if (c.groups[i].by_address) source.row_addresses = addresses[i].data();
    sources.push_back(source);
  }
  const size_t queries = size_t{c.shape.n_groups} * c.shape.max_queries;
  ExactResult out;
  out.y.resize(queries * c.shape.row.value_dim);
  out.lse.resize(queries);
  out.errors.assign(c.shape.n_groups, kGroupOk);
  std::vector<float> workspace(plan.workspace_bytes / sizeof(float), -7.0f);
  const ExactArgs args{sources.data(),    out.y.data(),     out.lse.data(),
                       out.errors.data(), workspace.data(), plan.workspace_bytes};
  const internal::ExactParams params{c.shape, plan.n_splits, args};
  if (internal::LaunchExactKernel(params, plan, nullptr) != 0 ||
      internal::LaunchExactMergeKernel(params, nullptr) != 0) {
    return Error{Code::kInternal, "an emulated kernel failed"};
  }
  return out;
}

TEST(EmulatedExact, RandomBatches) {
  const uint64_t seed = prefixd::testing::Seed("EmulatedExact.RandomBatches");
  emulated::SetSeed(seed);
  testing::ExactRandomBatches(Emulated, seed, 8, 70, 600, 90);
}

TEST(EmulatedExact, HardCases) {
  const uint64_t seed = prefixd::testing::Seed("EmulatedExact.HardCases");
  emulated::SetSeed(seed);
  testing::ExactHardCases(Emulated, seed);
}

TEST(PlanExact, LargestShapeFitsAndLargerIsRefused) {
  ExactShape shape;
  shape.n_groups = 8;
  shape.row = {256, 256, DType::kF32};
  shape.max_queries = 1024;
  shape.max_rows = 1 << 20;
  const Result<ExactPlan> largest = PlanExact(shape, FakeDevice(132));
  ASSERT_TRUE(largest.ok()) << largest.error().ToString();
  EXPECT_GT(largest->n_splits, 1u);
  const auto refused = [&](const char* what, auto change) {
    ExactShape bad = shape;
    change(bad);
    const Result<ExactPlan> plan = PlanExact(bad, FakeDevice(132));
    ASSERT_FALSE(plan.ok()) << what;
    EXPECT_NE(plan.error().message.find(what), std::string::npos) << plan.error().message;
  };
  refused("key_dim", [](ExactShape& s) { s.row.key_dim = 0; });
  refused("value_dim", [](ExactShape& s) { s.row.value_dim = 257; });
  refused("max_queries", [](ExactShape& s) { s.max_queries = 0; });
  refused("n_groups", [](ExactShape& s) { s.n_groups = 70000; });
  refused("f32, f16 or bf16", [](ExactShape& s) { s.row.dtype = static_cast<DType>(9); });
  DeviceInfo small = FakeDevice(8);
  small.shared_bytes_max = 48 * 1024;
  EXPECT_FALSE(PlanExact(shape, small).ok());
  EXPECT_FALSE(LaunchExact(*largest, {}, nullptr).ok());
}

}  // namespace
}  // namespace prefixd::gpu
