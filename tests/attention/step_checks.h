// Checks a case of GroupStep: it runs, and agrees with the float64 reference.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "tests/attention/step_fixture.h"
#include "tests/support/test.h"

namespace prefixd::testing {

inline constexpr EstimatorKind kAll[] = {EstimatorKind::kNone, EstimatorKind::kMoment,
                                         EstimatorKind::kPhi};

inline void BuildAll(StepCase& c, Random& random) {
  c.BuildMoment(true);
  c.BuildPhi(random, 8, 12);
}

inline StepOutput StepOf(const StepCase& c, EstimatorKind kind) {
  StepOutput out = c.Buffers();
  const Status status = GroupStep(c.Input(kind), out.spans());
  EXPECT_TRUE(status.ok()) << (status.ok() ? "" : status.error().message);
  return out;
}

// Expects the step of `kind` to agree with the float64 reference within the bound of step.h.
// `amplified(in, g)`: how far the estimate's own rounding exceeds the exact part's, 0 without one.
inline void ExpectMatches(const StepCase& c, EstimatorKind kind,
                          const std::function<double(const GroupStepInput&, uint32_t)>& amplified) {
  const GroupStepInput in = c.Input(kind);
  StepOutput out = c.Buffers();
  const Status status = GroupStep(in, out.spans());
  ASSERT_TRUE(status.ok()) << status.error().message;
  const uint32_t dv = c.shape().value_dim;
  const reference::States want = reference::GroupStep(in, dv);
  for (uint32_t g = 0; g < c.group; ++g) {
    const double bound = ExactBound(want.max_abs_score[g]);
    const double extra = amplified ? amplified(in, g) : 0;
    if (want.lse[g] == -std::numeric_limits<double>::infinity()) {
      ASSERT_EQ(out.lse[g], -std::numeric_limits<float>::infinity());
    } else {
      ASSERT_NEAR(out.lse[g], want.lse[g],
                  bound + 1e-7 * std::abs(want.lse[g]) + extra * want.rho_z[g])
          << "head " << g;
    }
    ASSERT_NEAR(out.rho_z[g], want.rho_z[g], 4 * bound + extra) << "head " << g;
    double largest = 0;
    for (uint32_t l = 0; l < dv; ++l) {
      largest = std::max(largest, want.abs_y[size_t{g} * dv + l]);
    }
    for (uint32_t l = 0; l < dv; ++l) {
      const size_t at = size_t{g} * dv + l;
      const double slack = extra * want.rho_z[g] * (largest + 4);
      ASSERT_NEAR(out.y[at], want.y[at], bound * want.abs_y[at] + slack + 1e-30)
          << "head " << g << " element " << l << " rho " << want.rho_z[g];
    }
  }
}

}  // namespace prefixd::testing
