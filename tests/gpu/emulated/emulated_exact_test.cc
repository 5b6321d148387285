// Exact attention on an emulated device.
#include "prefixd/gpu/exact.h"
#include "tests/gpu/emulated/emulated_cuda.h"
#include "tests/gpu/emulated/fake_device.h"
#include "tests/gpu/exact_run.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::gpu {
namespace {

using testing::ExactCase;
using testing::ExactResult;

Result<ExactResult> Emulated(const ExactCase& c) {
  return testing::RunExact(c, testing::LaunchOnce);
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
  shape.max_queries = 256;
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
