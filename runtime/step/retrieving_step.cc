#include "runtime/step/retrieving_step.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "runtime/prefix/head_keys.h"
#include "runtime/step/charges.h"
#include "runtime/step/estimator_input.h"
#include "storage/segment/stored_part.h"

namespace prefixd {
namespace {

// Reports the step's estimate of what it has not read.
void Tell(const SessionPlan& plan, const GroupStepInput& in, std::span<const float> lse,
          std::span<const float> rho_z, GroupTask& report) {
  const uint64_t remaining = in.mid_count - in.retrieved.count;
  const bool known = remaining == 0 || in.estimator != EstimatorKind::kNone;
  for (uint32_t g = 0; g < in.group; ++g) {
    const float rho = known ? rho_z[g] : std::numeric_limits<float>::quiet_NaN();
    report.rho_z.push_back(rho);
    if (!plan.policy.report_missing) continue;
    // The exact part's lse is that of the merged state less the estimate.
    const bool merged = in.merge_estimate && in.estimator != EstimatorKind::kNone;
    const double lse_exact = merged ? lse[g] + std::log1p(-double{rho_z[g]}) : lse[g];
    report.missing.push_back(
        MissingMassOf(in.cuts.empty() ? Cut{} : in.cuts[g], remaining, lse_exact, rho));
  }
}

const HeadPlan kNoHead;  // of mode kAnchors

}  // namespace

RetrievingStep::RetrievingStep(const StepParts& parts, GroupTask& task)
    : parts_(parts),
      task_(task),
      plan_(*task.plan),
      prefix_(*plan_.prefix),
      head_(plan_.policy.mode == StepMode::kRetrieve ? plan_.heads[task.head] : kNoHead),
      retrieves_(Retrieves(task)),
      row_(prefix_.row(task.head)),
      scratch_(parts.scratch.Acquire()),
      retained_(Retained()) {}

TokenRange RetrievingStep::Retained() const {
  if (!plan_.retained || plan_.policy.mode != StepMode::kRetrieve) return {};
  return plan_.retained->In(task_.head, prefix_.partition().mid);
}

std::span<const uint32_t> RetrievingStep::RetainedIds() const {
  if (retained_.size() == 0) return {};
  return std::span(plan_.retained->heads[task_.head].tokens)
      .subspan(retained_.begin, retained_.size());
}

std::optional<GroupSearch> RetrievingStep::Search() {
  if (!retrieves_ || task_.shared) return std::nullopt;
  scratch_->found_keys.clear();
  return GroupSearch{
      &plan_, task_.q, task_.k, &task_.ledger, scans() ? &scores_ : nullptr, &scratch_->found_keys};
}

Status RetrievingStep::Read(Result<Selection> found, RetrievedRows& retrieved,
                            storage::ReadStats& reads) {
  if (task_.shared) {
    scratch_->found_keys.clear();
    selection_.ids = task_.shared->ids;
    task_.ledger.selections += 1;
    if (task_.shared->rows) kept_ = task_.shared->rows->Get();
  } else if (retrieves_) {
    PREFIXD_ASSIGN(selection_, std::move(found));
  }
  if (kept_) {
    rows_ = kept_->view(row_);
  } else if (retrieves_) {
    LeaveOut(RetainedIds(), row_.key_bytes(), selection_.ids, scratch_->found_keys);
    StageTimer timer(task_.ledger.read_ns);
    PREFIXD_TRY(retrieved.Read(prefix_, task_.head, selection_.ids, scratch_->found_keys, reads));
    rows_ = retrieved.rows(row_);
  }
  if (plan_.ahead) task_.retrieved = selection_.ids;
  if (plan_.shared && retrieves_) Share();
  if (retained_.size() > 0) Join();
  return {};
}

// Puts the retained tokens among those that were read.
void RetrievingStep::Join() {
  JoinRetained(plan_.retained->heads[task_.head], retained_, row_, rows_, selection_.ids,
               scratch_->joined);
  rows_ = ScatteredRows(scratch_->joined, row_);
  retrieved_scores_ = {};  // of fewer rows
}

// Computes the cuts of a shared set, or keeps this step's set for later steps.
void RetrievingStep::Share() {
  const auto scores = Scratch::Take(scratch_->scores, task_.q.size() / row_.key_dim * rows_.count);
  std::shared_ptr<GatheredRows> copy;
  if (task_.shared && task_.shared->rows && !task_.shares_last && !kept_ &&
      parts_.compute.wants_rows_together()) {
    copy = parts_.gathered_rows.Take(selection_.ids, row_);
  }
  ScoreRead(scores, copy.get());
  StageTimer timer(task_.ledger.select_ns);
  if (task_.shared) {
    selection_.cuts = CutsFromOffsets(task_.shared->offsets, scores);
    if (copy) task_.shared->rows->Put(std::move(copy));
    return;
  }
  RetrievedSet set = SetToShare(plan_, task_.head, selection_.ids, selection_.cuts, scores);
  LeaveOut(RetainedIds(), set.ids);  // where they are neighbours
  plan_.shared->Keep(task_.head, task_.q, std::move(set));
}

// Scores the rows that were read, and copies them into `copy` if it is not null.
void RetrievingStep::ScoreRead(std::span<float> scores, GatheredRows* copy) {
  StageTimer timer(task_.ledger.compute_ns);
  const KvGeometry& geometry = prefix_.model()->spec.geometry;
  const uint32_t of_layer = prefix_.layer_of(task_.head), group = geometry.group_size(of_layer);
  const LayerGeometry& layer = geometry.layers[of_layer];
  // The step itself can reuse these scores unless a softcap follows.
  if (layer.softcap > 0 || !parts_.compute.takes_scores()) {
    Scores(task_.q, group, layer, rows_, scores);
    if (copy) copy->Put(rows_, 0, rows_.count);
    return;
  }
  // Rows are copied in short runs, while they and their pages' addresses are in the caches.
  constexpr size_t kTogether = 64;
  const size_t run = copy ? kTogether : rows_.count;
  for (size_t begin = 0; begin < rows_.count; begin += run) {
    const size_t n = std::min(run, rows_.count - begin);
    StepScores(task_.q, group, layer, rows_, begin, n, scores);
    if (copy) copy->Put(rows_, begin, n);
  }
  retrieved_scores_ = scores;
}

Status RetrievingStep::Finish(Result<Selection> found) {
  Ledger& ledger = task_.ledger;
  const KvGeometry& geometry = prefix_.model()->spec.geometry;
  const uint32_t layer = prefix_.layer_of(task_.head), group = geometry.group_size(layer);
  ReadCharge charge(ledger);
  storage::ReadStats& reads = charge.reads;

  AnchorRows anchors;
  {
    StageTimer timer(ledger.read_ns);
    PREFIXD_ASSIGN(anchors, prefix_.Anchors(task_.head, &reads));
  }
  RetrievedRows retrieved(scratch_->retrieved);
  if (retrieves_ || retained_.size() > 0) {
    PREFIXD_TRY(Read(std::move(found), retrieved, reads));
  }

  GroupStepInput in;
  in.queries = task_.q;
  in.group = group;
  in.layer = geometry.layers[layer];
  in.sinks = anchors.sinks;
  in.tail = anchors.tail;
  if (!selection_.ids.empty()) in.retrieved = rows_;
  in.cuts = selection_.cuts;
  in.retrieved_scores = retrieved_scores_;
  in.mid_count = prefix_.partition().mid.size();
  EstimatorInput estimator;
  std::vector<uint32_t> of_mid;  // retrieved tokens, relative to the mid region's begin
  if (in.mid_count > selection_.ids.size() && head_.summary) {
    const KeptSummary& kept = *head_.summary;
    estimator.Attach(head_.reads(), kept.summary, prefix_.maps(), task_.head, in);
    if (head_.estimator.kind == EstimatorKind::kPhi && !selection_.ids.empty()) {
      PREFIXD_ASSIGN(const TokenFeatures* features, prefix_.Features(task_.head, &reads));
      if (features) estimator.AttachFeatures(*features, selection_.ids, in);
    }
    if (kept.clusters) {
      PREFIXD_ASSIGN(HeadKeys keys, HeadKeys::Of(prefix_, task_.head, Bring::kLater, &reads));
      PREFIXD_ASSIGN(const auto clusters, kept.clusters->OfMid(task_.head, keys));
      for (uint32_t id : selection_.ids) of_mid.push_back(id - prefix_.partition().mid.begin);
      estimator.AttachClusters(clusters, of_mid, in);
      if (scans()) estimator.AttachScan(clusters, scores_, of_mid, in);
    }
  }
  in.merge_estimate = !head_.watched;
  const auto rho_z = Scratch::Take(scratch_->rho_z, group);
  {
    StageTimer timer(ledger.compute_ns);
    PREFIXD_TRY(
        parts_.compute.Step(in, {task_.y, task_.lse, rho_z}, plan_.weak_from_this().lock()));
  }
  ledger.anchor_tokens += prefix_.partition().anchor_count();
  ledger.retrieved_tokens += selection_.ids.size() - retained_.size();
  ledger.retained_tokens += retained_.size();
  ledger.charged_summary_tokens += head_.summary_tokens;
  if (in.features.data) {
    const uint64_t bytes = selection_.ids.size() * in.features.stride;
    ledger.feature_bytes += bytes;
    ledger.logical_bytes += bytes;
    ledger.feature_tokens +=
        static_cast<double>(bytes) / storage::MeanRowBytes(prefix_.stored().parts(), row_);
  }
  const auto stored_bytes = [&](const auto& tokens) {
    return storage::RowsBytes(prefix_.stored().parts(), row_, tokens);
  };
  ledger.logical_bytes += stored_bytes(prefix_.partition().sink) +
                          stored_bytes(prefix_.partition().tail) + stored_bytes(selection_.ids) -
                          stored_bytes(RetainedIds());
  for (float share : rho_z) ledger.rho_z_sum += in.merge_estimate ? share : 0;
  ledger.rho_z_count += group;
  Tell(plan_, in, task_.lse, rho_z, task_);
  return {};
}

}  // namespace prefixd
