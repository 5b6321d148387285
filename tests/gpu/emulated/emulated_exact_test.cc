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

Result<ExactResult> EmulatedExact(const ExactCase& c) {
  return testing::RunExact(c, testing::LaunchOnce);
}

TEST(EmulatedExact, RandomBatches) {
  const uint64_t seed = prefixd::testing::Seed("EmulatedExact.RandomBatches");
  emulated::SetSeed(seed);
  testing::ExactRandomBatches(EmulatedExact, seed, 8, 70, 600, 90);
}

TEST(EmulatedExact, HardCases) {
  const uint64_t seed = prefixd::testing::Seed("EmulatedExact.HardCases");
  emulated::SetSeed(seed);
  testing::ExactHardCases(EmulatedExact, seed);
}

// As on devices that give a block 99 KiB: other tiles, and for the widest rows one stage.
TEST(EmulatedExact, LittleSharedMemory) {
  const uint64_t seed = prefixd::testing::Seed("EmulatedExact.LittleSharedMemory");
  emulated::SetSeed(seed);
  const auto run = [](const ExactCase& c) {
    return testing::RunExact(c, testing::LaunchOnce, 99 * 1024);
  };
  testing::ExactRandomBatches(run, seed, 8, 112, 300, 90);
}

TEST(PlanExact, TilesFitTheDevice) {
  ExactShape shape;
  shape.n_groups = 8;
  shape.row = {128, 128, DType::kBf16};
  shape.max_rows = 1 << 17;
  const auto plan = [&](uint32_t queries, size_t shared_kib) {
    shape.max_queries = queries;
    DeviceInfo device = FakeDevice(132);
    device.shared_bytes_max = shared_kib * 1024;
    return PlanExact(shape, device).value();
  };
  EXPECT_EQ(plan(4, 227).tile_queries, 16u);
  EXPECT_EQ(plan(64, 227).tile_queries, 64u);
  EXPECT_EQ(plan(65, 227).tile_queries, 128u);
  EXPECT_EQ(plan(65, 163).tile_queries, 64u);
  EXPECT_EQ(plan(65, 99).tile_rows, 32u);
  EXPECT_TRUE(plan(65, 99).reads_ahead);
  EXPECT_EQ(plan(4, 227).n_splits, 16u);  // a block for each of 132 multiprocessors but four
  shape.row = {256, 256, DType::kBf16};
  EXPECT_FALSE(plan(65, 163).reads_ahead);
  shape.row = {192, 128, DType::kBf16};
  EXPECT_FALSE(plan(65, 99).reads_ahead);
  // Memory is the caller's: many splits are not worth a hundredth of the time.
  shape.row = {128, 128, DType::kBf16};
  shape.max_rows = 1 << 20;
  EXPECT_LE(plan(1024, 227).n_splits, 4u);
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
