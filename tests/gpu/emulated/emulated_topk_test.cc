// The Top-K on an emulated device.
#include "tests/gpu/emulated/emulated_cuda.h"
#include "tests/gpu/topk_run.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::gpu {
namespace {

using testing::TopKCase;
using testing::TopKResult;

Result<TopKResult> EmulatedTopK(const TopKCase& c) {
  return testing::RunTopK(c, testing::LaunchOnce);
}

TEST(EmulatedTopK, RandomBatches) {
  const uint64_t seed = prefixd::testing::Seed("EmulatedTopK.RandomBatches");
  emulated::SetSeed(seed);
  testing::TopKRandomBatches(EmulatedTopK, seed, 12, 140, 5000);
}

TEST(EmulatedTopK, HardCases) {
  const uint64_t seed = prefixd::testing::Seed("EmulatedTopK.HardCases");
  emulated::SetSeed(seed);
  testing::TopKHardCases(EmulatedTopK, seed);
}

TEST(PlanTopK, RefusesWhatItCannotRun) {
  TopKShape good;
  good.n_groups = 8;
  good.group = 4;
  good.key_dim = 128;
  good.max_keys = 131072;
  good.max_k = 1311;
  ASSERT_TRUE(PlanTopK(good).ok());
  EXPECT_GT(PlanTopK(good)->workspace_bytes, size_t{8} * 131072 * 5 * 4);
  const auto refused = [&](const char* what, auto change) {
    TopKShape bad = good;
    change(bad);
    const Result<TopKPlan> plan = PlanTopK(bad);
    ASSERT_FALSE(plan.ok()) << what;
    EXPECT_NE(plan.error().message.find(what), std::string::npos) << plan.error().message;
  };
  refused("group size", [](TopKShape& s) { s.group = 17; });
  refused("n_groups", [](TopKShape& s) { s.n_groups = 0; });
  refused("key_dim", [](TopKShape& s) { s.key_dim = 257; });
  refused("max_keys", [](TopKShape& s) { s.max_keys = 0; });
  refused("max_k", [](TopKShape& s) { s.max_k = kMaxTopK + 1; });
  refused("f32, f16 or bf16", [](TopKShape& s) { s.dtype = static_cast<DType>(9); });
  TopKArgs none;
  EXPECT_FALSE(LaunchTopK(*PlanTopK(good), none, nullptr).ok());
}

}  // namespace
}  // namespace prefixd::gpu
