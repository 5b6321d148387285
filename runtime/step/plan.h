// Turns a session's policy into a plan: for each (layer, KV head) the estimator, and how many
// tokens the read budget leaves to retrieve.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "prefixd/estimator_variant.h"
#include "prefixd/partition.h"
#include "prefixd/policy.h"
#include "runtime/prefix/prefetcher.h"
#include "runtime/prefix/prepared_prefix.h"
#include "runtime/retention/scorer_shelf.h"
#include "runtime/step/retained_tokens.h"
#include "runtime/step/shared_sets.h"

namespace prefixd {

struct HeadPlan {
  EstimatorVariant estimator = EstimatorKind::kNone;  // never kAuto
  uint32_t k = 0;
  double summary_tokens = 0;  // what the budget pays for the estimator's summary, per step
  std::shared_ptr<const KeptSummary> summary;  // read by the estimator; null: none
  // Selects without an estimator, but reports what selection drops: plain moments measure that, and
  // the budget pays for them.
  bool watched = false;
  EstimatorVariant reads() const { return watched ? EstimatorKind::kMoment : estimator; }
};

// The plan of one session. Immutable once the session has it, except for what steps leave to later
// ones in `shared` and `ahead`; steps in flight keep the plan that they began with.
struct SessionPlan : std::enable_shared_from_this<SessionPlan> {
  StepPolicy policy;
  std::shared_ptr<PreparedPrefix> prefix;
  std::vector<HeadPlan> heads;  // [Model::heads]; mode kRetrieve only
  index::IndexKind selector = index::IndexKind::kExact;
  std::unique_ptr<SharedSets> shared;      // null: every step retrieves
  std::unique_ptr<SessionPrefetch> ahead;  // null: nothing is prefetched
  std::string estimator;  // for people: "phi (length 8192)", "moment, untuned", ...
  // How many own tokens of the session the prefix ends with, and what keeps them stored.
  uint32_t moved = 0;
  std::shared_ptr<const void> moved_name;
  // Those of them whose rows stay in memory; null: none.
  std::shared_ptr<const RetainedTokens> retained;
  // What policy.retain ranks by, if by trained scorers.
  std::shared_ptr<const ShelvedScorers> scorers;
};

// Makes a plan and loads the summaries that the policy needs; physical reads are added to `reads`
// [heads]. kInfeasible when the budget cannot pay for anchors and a fixed estimator in some layer
// (kAuto takes the best estimator that the budget can pay for); kFailedPrecondition when the policy
// names an estimator or index that is not there (yet). kResourceExhausted when what it needs does
// not fit into memory. priority: of what several threads do.
Result<std::shared_ptr<SessionPlan>> MakePlan(const RuntimeOptions& options, Prefetcher& prefetcher,
                                              std::shared_ptr<PreparedPrefix> prefix,
                                              const StepPolicy& policy,
                                              std::vector<storage::ReadStats>* reads,
                                              WorkPriority priority = WorkPriority::kStep);

}  // namespace prefixd
