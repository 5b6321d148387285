// Runs steps that read a part of their prefix: the anchors, retrieved rows, an estimate of the
// rest.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "attention/rows/rows.h"
#include "prefixd/selection.h"
#include "runtime/step/retrieve.h"
#include "runtime/step/step.h"

namespace prefixd {

// Runs one task in mode kAnchors or kRetrieve: over the anchors and, in kRetrieve, the retrieved
// rows and the estimated remainder. `parts` and `task` must outlive it.
//
// Thread-safety: one thread at a time.
class RetrievingStep {
 public:
  RetrievingStep(const StepParts& parts, GroupTask& task);

  Scratch& scratch() { return *scratch_; }
  // Returns nothing when there is nothing to search for, or an earlier step's set is shared.
  std::optional<GroupSearch> Search();
  // Ends the step; `found` is the search's result, if the task searched.
  Status Finish(Result<Selection> found);

 private:
  // The places of retained tokens in their head's lists.
  TokenRange Retained() const;
  std::span<const uint32_t> RetainedIds() const;
  bool scans() const { return head_.estimator.kind == EstimatorKind::kScan; }
  Status Read(Result<Selection> found, RetrievedRows& retrieved, storage::ReadStats& reads);
  void Share();
  void Join();
  void ScoreRead(std::span<float> scores, GatheredRows* copy);

  const StepParts& parts_;
  GroupTask& task_;
  const SessionPlan& plan_;
  PreparedPrefix& prefix_;
  const HeadPlan& head_;
  const bool retrieves_;
  const RowShape row_;
  const ScratchPool::Lease scratch_;
  const TokenRange retained_;
  Selection selection_;                       // in the end with those that are retained
  RowsView rows_;                             // rows of selection_
  std::shared_ptr<const GatheredRows> kept_;  // an earlier step's copy that holds rows_
  std::vector<float> scores_;
  std::span<const float> retrieved_scores_;  // scores of rows_, where the cuts needed them
};

}  // namespace prefixd
