// Sessions that retain own tokens by a policy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/session/session_impl.h"
#include "tests/runtime/step/own_memory_fixture.h"

namespace prefixd::testing {

inline constexpr uint32_t kRetained = 24;

class RetainTest : public testing::OwnMemoryTest {
 protected:
  // Everything is retrieved or retained, so that answers are exact.
  static StepPolicy Everything(const std::string& by, uint32_t tokens = kRetained) {
    StepPolicy policy = {.estimator = EstimatorKind::kNone, .k = 1u << 20};
    policy.retain = {tokens, by};
    return policy;
  }
  // Positions behind the prompt.
  std::vector<uint32_t> Retained(Session& session, size_t head) const {
    const auto plan = *dynamic_cast<SessionImpl&>(session).plan();
    if (!plan->retained) return {};
    const TokenRange in = plan->retained->In(head, plan->prefix->partition().mid);
    std::vector<uint32_t> out;
    for (uint32_t i = in.begin; i < in.end; ++i) {
      out.push_back(plan->retained->heads[head].tokens[i] - prompt_.n_tokens);
    }
    return out;
  }
};

}  // namespace prefixd::testing
