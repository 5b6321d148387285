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
#include "storage/read/row_access.h"

namespace prefixd {

// Bundles what the steps of a store share.
struct StepParts {
  Compute& compute;
  ScratchPool& scratch;
  GatheredRowCache& gathered_rows;
};

// Whether a thread may go on with tasks that it has begun.
class StepTurn {
 public:
  virtual ~StepTurn() = default;
  // Asked between pieces of work. False: other tenants' tasks go first, and what is not done stays
  // as it is until it is asked for again.
  virtual bool GoesOn() = 0;
  // Others wait for the cores: pieces must be short.
  virtual bool shared() const = 0;
};

// How far an exact pass has come.
struct PassState {
  storage::VisitPlace place;
  bool first = true;          // no batch has ended
  uint32_t queries = 0;       // of the batch after `place`: those that were attended with
  std::vector<float> y, lse;  // their states over that batch, unless it is the first
};

// One group's step, or its share in an exact pass of several tokens.
struct GroupTask {
  std::shared_ptr<const SessionPlan> plan;
  size_t head = 0;
  uint32_t k = 0;            // tokens to retrieve
  std::span<const float> q;  // [G][key_dim]
  std::span<float> y, lse;   // out: [G][value_dim], [G]
  SharedSet shared;          // an earlier step's set, used by this step; null: none
  bool shares_last = false;  // no later step may use it
  CallLimits limits;         // of its caller, who waits for it
  OwnRows own;               // those behind plan->moved are attended exactly and merged in
  uint32_t own_after = 0;    // of an exact pass, as MergeOwn takes it
  uint32_t n_queries = 0;    // of an exact pass, in place of G; 0: a step
  PassState exact;           // of an exact pass, or of a step in mode full
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
  // Returns the query heads of its KV head, G.
  uint32_t group() const;
  Key key() const { return {plan->prefix.get(), head, plan->selector}; }
};

// Whether a task retrieves; it then searches, unless it shares a set.
bool Retrieves(const GroupTask& task);

// Runs tasks with one key: their searches together, the rest one after the other. Sets `done` of
// those that have ended: all, unless the turn did not go on. Exact passes then go on where they
// stopped, with the same result to the bit.
// Thread-safety: any number of concurrent calls.
void StepGroups(const StepParts& parts, std::span<GroupTask* const> tasks, StepTurn& turn);

}  // namespace prefixd
