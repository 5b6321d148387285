// One group (session, KV head) of a step: select, read, attend (spec §2).
#pragma once

#include <span>
#include <vector>

#include "runtime/core.h"
#include "runtime/plan.h"

namespace prefixd {

// What a group's step did, also when it failed half-way.
struct GroupReport {
  Ledger ledger;
  std::vector<float> rho_z;          // [G], as StepInfo
  std::vector<MissingMass> missing;  // [G] if the policy asks for it
};

// q: [G][key_dim] -> y: [G][value_dim], lse: [G]; k tokens are retrieved.
// Thread-safety: any number of groups at once.
Status StepGroup(const Core& core, const SessionPlan& plan, size_t head, uint32_t k,
                 std::span<const float> q, std::span<float> y, std::span<float> lse,
                 GroupReport& report);

// Exact attention of n_queries queries [n_queries][key_dim] of one KV head over the whole prefix,
// streamed once. Charges bytes and time, not steps.
Status ExactGroup(const Core& core, const SessionPlan& plan, size_t head, uint32_t n_queries,
                  std::span<const float> q, std::span<float> y, std::span<float> lse,
                  Ledger& ledger);

}  // namespace prefixd
