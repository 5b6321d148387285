// Counts the allocations of a step: buffers live from step to step, and what a step still allocates
// for each head is bounded here, so that it does not creep up.
#include "tests/runtime/runtime_fixture.h"
#include "tests/support/count_allocations.h"

namespace prefixd::testing {
namespace {

class StepAllocationsTest : public RuntimeTest {
 protected:
  // Returns the median of the allocations of one head in a step, after steps of the same kind.
  // `append`: of steps that append an own token as well.
  double PerHead(const StepPolicy& policy, bool codes, bool append = false) {
    options_.build_codes = codes;
    options_.codes_min_tokens = 1024;
    options_.host_tier_bytes = 64 << 20;
    Open();
    const uint64_t seed = Seed("StepAllocations");
    const auto prompt = MakePrompt(spec_.geometry, 3000, seed);
    PutReady(prompt);
    const auto session = Attach(prompt, policy);
    if (!session) return 1e9;
    const KvGeometry& g = spec_.geometry;
    Random random(seed + 1);
    std::vector<float> y(size_t{g.n_q_heads} * g.value_dim), lse(g.n_q_heads);
    const auto step = [&] {
      const auto q = random.Normals(size_t{g.n_q_heads} * g.key_dim);
      const uint64_t before = allocations.load();
      const Status status =
          append ? session->StepAppend(1, q, prompt.K(1, 5, 1), prompt.V(1, 5, 1), y, lse, nullptr)
                 : session->Step(1, q, y, lse, nullptr);
      const uint64_t made = allocations.load() - before;
      EXPECT_TRUE(status.ok()) << status.error().ToString();
      return made;
    };
    for (int i = 0; i < 20; ++i) step();
    WaitLoaded();
    std::vector<uint64_t> made;
    for (int i = 0; i < 21; ++i) made.push_back(step());
    std::ranges::nth_element(made, made.begin() + 10);
    return double(made[10]) / g.n_kv_heads;
  }
};

TEST_F(StepAllocationsTest, AreFewWithCodes) {
  StepPolicy policy;
  policy.budget = 0.05;
  const double n = PerHead(policy, true);
  std::printf("allocations per head: %.1f\n", n);
  EXPECT_LE(n, 120);
}

TEST_F(StepAllocationsTest, AreFewWithoutAnEstimator) {
  StepPolicy policy;
  policy.budget = 0.05;
  policy.estimator = EstimatorKind::kNone;
  const double n = PerHead(policy, false);
  std::printf("allocations per head: %.1f\n", n);
  EXPECT_LE(n, 50);
}

// Own tokens need memory once for 64 of them, and two small lists a call.
TEST_F(StepAllocationsTest, AreHardlyMoreWithOwnTokens) {
  StepPolicy policy;
  policy.budget = 0.05;
  policy.estimator = EstimatorKind::kNone;
  const double step = PerHead(policy, false), append = PerHead(policy, false, true);
  std::printf("allocations per head: %.1f, with own tokens %.1f\n", step, append);
  EXPECT_LE(append - step, 3);
}

}  // namespace
}  // namespace prefixd::testing
