// The Top-K's kernels on emulated blocks.
#include <algorithm>
#include <cstring>
#include <vector>

#include "gpu/topk_layout.h"
#include "tests/gpu/emulated_cuda.h"
#include "tests/gpu/topk_cases.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::gpu {
namespace {

using testing::TopKCase;
using testing::TopKResult;

Result<TopKResult> Emulated(const TopKCase& c) {
  PREFIXD_ASSIGN(const TopKPlan plan, PlanTopK(c.shape));
  const uint32_t n = c.shape.n_groups, G = c.shape.group;
  internal::HostImage measure(nullptr, nullptr);
  (void)testing::PackTopK(c, measure);
  std::vector<uint4> memory(measure.bytes() / sizeof(uint4) + 1);
  auto* base = reinterpret_cast<std::byte*>(memory.data());
  internal::HostImage image(base, base);
  const TopKSource* sources = testing::PackTopK(c, image);
  std::vector<uint32_t> ids(size_t{n} * c.shape.max_k), counts(n), errors(n, kGroupOk);
  std::vector<Cut> cuts(size_t{n} * G);
  const internal::TopKLayout layout(c.shape);
  std::vector<uint32_t> workspace(layout.total_words(), 0xffffffffu);
  std::fill_n(workspace.begin(), layout.all_zero_words(), 0u);
  const TopKArgs args{c.queries.data(), sources,       ids.data(),       counts.data(),
                      cuts.data(),      errors.data(), workspace.data(), plan.workspace_bytes};
  const internal::TopKParams params{c.shape, args};
  if ((c.shape.codes && internal::LaunchCodeQueryKernel(params, nullptr) != 0) ||
      internal::LaunchScoreKernel(params, nullptr) != 0 ||
      internal::LaunchSelectKernels(params, nullptr) != 0) {
    return Error{Code::kInternal, "an emulated kernel failed"};
  }
  TopKResult out;
  out.errors = errors;
  for (uint32_t g = 0; g < n; ++g) {
    Selection selection;
    const auto first = ids.begin() + size_t{g} * c.shape.max_k;
    selection.ids.assign(first, first + std::min(counts[g], c.shape.max_k));
    selection.cuts.assign(cuts.begin() + size_t{g} * G, cuts.begin() + (size_t{g} + 1) * G);
    out.groups.push_back(std::move(selection));
    const TopKCase::Group& group = c.groups[g];
    for (uint32_t h = 0; h < G && c.shape.codes && group.candidates() > 0; ++h) {
      const auto& of =
          reinterpret_cast<const internal::CodeNumbers&>(workspace[layout.code_at(g, h)]);
      const auto* values =
          reinterpret_cast<const int16_t*>(workspace.data() + layout.score_at(g, h)) + group.skip;
      out.seen.push_back(
          {of.mul, of.add, of.mul * of.units_of_mean, {values, values + group.candidates()}});
    }
    if (c.shape.codes && group.candidates() == 0) out.seen.resize(out.seen.size() + G);
  }
  return out;
}

TEST(EmulatedTopK, RandomBatches) {
  const uint64_t seed = prefixd::testing::Seed("EmulatedTopK.RandomBatches");
  emulated::SetSeed(seed);
  testing::TopKRandomBatches(Emulated, seed, 12, 140, 5000);
}

TEST(EmulatedTopK, HardCases) {
  const uint64_t seed = prefixd::testing::Seed("EmulatedTopK.HardCases");
  emulated::SetSeed(seed);
  testing::TopKHardCases(Emulated, seed);
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
