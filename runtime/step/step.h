// Runs the steps of groups (session, KV head): select, read, attend (docs/mathematics.md).
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "attention/step/missing_mass.h"
#include "base/call_scope.h"
#include "prefixd/ledger.h"
#include "runtime/step/compute.h"
#include "runtime/step/gathered_rows.h"
#include "runtime/step/own_tokens.h"
#include "runtime/step/plan.h"
#include "runtime/work/scratch.h"

namespace prefixd {

// Bundles what the steps of a store share.
struct StepParts {
  Compute& compute;
  ScratchPool& scratch;
  GatheredRowCache& gathered_rows;
};

// One group's step.
struct GroupTask {
  std::shared_ptr<const SessionPlan> plan;
  size_t head = 0;
  uint32_t k = 0;            // tokens to retrieve
  std::span<const float> q;  // [G][key_dim]
  std::span<float> y, lse;   // out: [G][value_dim], [G]
  SharedSet shared;          // an earlier step's set, used by this step; null: none
  bool shares_last = false;  // no later step may use it
  CallLimits limits;         // of its caller, who waits for it
  OwnRows own;               // attended exactly and merged in; empty: the prefix alone
  // Outputs, also valid when the step failed half-way.
  Ledger ledger;
  std::vector<float> rho_z;          // [G], see StepInfo
  std::vector<MissingMass> missing;  // [G], if policy.report_missing
  std::vector<uint32_t> retrieved;   // ascending, if the policy prefetches
  Status status;
  bool done = false;

  // Tasks with equal keys can be searched together: one head of one prefix, one kind of index.
  struct Key {
    const PreparedPrefix* prefix = nullptr;
    size_t head = 0;
    index::IndexKind selector = index::IndexKind::kExact;
    auto operator<=>(const Key&) const = default;
  };
  Key key() const { return {plan->prefix.get(), head, plan->selector}; }
};

// Whether a task retrieves; it then searches, unless it shares a set.
bool Retrieves(const GroupTask& task);

// Runs the steps of tasks with one key: their searches together, the rest one step after the other.
// Thread-safety: any number of concurrent calls.
void StepGroups(const StepParts& parts, std::span<GroupTask* const> tasks);

// Computes exact attention of n_queries queries [n_queries][key_dim] of one KV head over the whole
// prefix, streamed once. Charges bytes and time, not steps.
Status ExactGroup(const StepParts& parts, const SessionPlan& plan, size_t head, uint32_t n_queries,
                  std::span<const float> q, std::span<float> y, std::span<float> lse,
                  Ledger& ledger);

// Attends exactly over own rows, too, and merges into y and lse, which hold the state of the
// prefix: queries of n tokens of one KV head, [n][G][key_dim], of which the i-th sees the first
// own.size() - after - n + 1 + i rows.
Status MergeOwn(const StepParts& parts, const SessionPlan& plan, size_t head, const OwnRows& own,
                uint32_t n, uint32_t after, std::span<const float> q, std::span<float> y,
                std::span<float> lse, Ledger& ledger);

}  // namespace prefixd
