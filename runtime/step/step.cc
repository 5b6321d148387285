#include "runtime/step/step.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>
#include <optional>
#include <utility>

#include "attention/rows/finite_check.h"
#include "attention/step/step.h"
#include "prefixd/merge.h"
#include "runtime/prefix/head_keys.h"
#include "runtime/step/charges.h"
#include "runtime/step/estimator_input.h"
#include "runtime/step/retrieve.h"
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

// Runs one task in mode kAnchors or kRetrieve: over the anchors and, in kRetrieve, the retrieved
// rows and the estimated remainder.
class RetrievingStep {
 public:
  RetrievingStep(const StepParts& parts, GroupTask& task)
      : parts_(parts),
        task_(task),
        plan_(*task.plan),
        prefix_(*plan_.prefix),
        head_(plan_.policy.mode == StepMode::kRetrieve ? plan_.heads[task.head] : kNoHead),
        retrieves_(Retrieves(task)),
        row_(prefix_.row(task.head)),
        scratch_(parts.scratch.Acquire()) {}

  Scratch& scratch() { return *scratch_; }
  // Returns nothing when there is nothing to search for, or an earlier step's set is shared.
  std::optional<GroupSearch> Search() {
    if (!retrieves_ || task_.shared) return std::nullopt;
    scratch_->found_keys.clear();
    return GroupSearch{&plan_,
                       task_.q,
                       task_.k,
                       &task_.ledger,
                       scans() ? &scores_ : nullptr,
                       &scratch_->found_keys};
  }
  // Ends the step; `found` is the search's result, if the task searched.
  Status Finish(Result<Selection> found);

 private:
  bool scans() const { return head_.estimator.kind == EstimatorKind::kScan; }
  Status Read(Result<Selection> found, RetrievedRows& retrieved, storage::ReadStats& reads);
  void Share();
  void ScoreRead(std::span<float> scores, GatheredRows* copy);

  const StepParts& parts_;
  GroupTask& task_;
  const SessionPlan& plan_;
  PreparedPrefix& prefix_;
  const HeadPlan& head_;
  const bool retrieves_;
  const RowShape row_;
  const ScratchPool::Lease scratch_;
  Selection selection_;
  RowsView rows_;                             // rows of selection_
  std::shared_ptr<const GatheredRows> kept_;  // an earlier step's copy that holds rows_
  std::vector<float> scores_;
  std::span<const float> retrieved_scores_;  // scores of rows_, where the cuts needed them
};

Status RetrievingStep::Read(Result<Selection> found, RetrievedRows& retrieved,
                            storage::ReadStats& reads) {
  std::span<const std::byte> selected_keys;
  if (task_.shared) {
    selection_.ids = task_.shared->ids;
    task_.ledger.selections += 1;
    if (task_.shared->rows) kept_ = task_.shared->rows->Get();
  } else {
    PREFIXD_ASSIGN(selection_, std::move(found));
    selected_keys = scratch_->found_keys;
  }
  if (kept_) {
    rows_ = kept_->view(row_);
  } else {
    StageTimer timer(task_.ledger.read_ns);
    PREFIXD_TRY(retrieved.Read(prefix_, task_.head, selection_.ids, selected_keys, reads));
    rows_ = retrieved.rows(row_);
  }
  if (plan_.ahead) task_.retrieved = selection_.ids;
  if (plan_.shared) Share();
  return {};
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
  plan_.shared->Keep(task_.head, task_.q,
                     SetToShare(plan_, task_.head, selection_.ids, selection_.cuts, scores));
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
  if (retrieves_) PREFIXD_TRY(Read(std::move(found), retrieved, reads));

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
  ledger.retrieved_tokens += selection_.ids.size();
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
                          stored_bytes(prefix_.partition().tail) + stored_bytes(selection_.ids);
  for (float share : rho_z) ledger.rho_z_sum += in.merge_estimate ? share : 0;
  ledger.rho_z_count += group;
  Tell(plan_, in, task_.lse, rho_z, task_);
  return {};
}

}  // namespace

bool Retrieves(const GroupTask& task) {
  if (task.plan->policy.mode != StepMode::kRetrieve) return false;
  return (task.k > 0 || task.plan->heads[task.head].estimator.kind == EstimatorKind::kScan) &&
         task.plan->prefix->partition().mid.size() > 0;
}

Status MergeOwn(const StepParts& parts, const SessionPlan& plan, size_t head, const OwnRows& own,
                uint32_t n, uint32_t after, std::span<const float> q, std::span<float> y,
                std::span<float> lse, Ledger& ledger) {
  const PreparedPrefix& prefix = *plan.prefix;
  const KvGeometry& geometry = prefix.model()->spec.geometry;
  const uint32_t of_layer = prefix.layer_of(head), group = geometry.group_size(of_layer);
  const LayerGeometry& layer = geometry.layers[of_layer];
  const RowShape row = geometry.row(of_layer);
  const auto scratch = parts.scratch.Acquire();
  StageTimer timer(ledger.compute_ns);
  // The rows [begin, end) for the queries of tokens [first, first + some).
  const auto merge = [&](uint32_t first, uint32_t some, uint32_t begin, uint32_t end) -> Status {
    const size_t at = size_t{first} * group, queries = size_t{some} * group;
    const auto own_y = Scratch::Take(scratch->y, queries * row.value_dim);
    const auto own_lse = Scratch::Take(scratch->lse, queries);
    PREFIXD_TRY(scratch->exact.Begin(q.subspan(at * row.key_dim, queries * row.key_dim),
                                     static_cast<uint32_t>(queries), layer, row));
    Status goes_on;
    const bool finite = own.Visit(begin, end, row, [&](const RowsView& rows) {
      goes_on = CheckCall();
      return goes_on.ok() && scratch->exact.Add(rows);
    });
    PREFIXD_TRY(goes_on);
    // The rows themselves were found finite when they were appended.
    if (!finite || !scratch->exact.Finish(own_y, own_lse)) return ExplainNonFinite({});
    for (size_t i = 0; i < queries; ++i) {
      MergeStates(y.subspan((at + i) * row.value_dim, row.value_dim), &lse[at + i],
                  own_y.subspan(i * row.value_dim, row.value_dim), own_lse[i]);
    }
    return {};
  };
  // What all queries see is read once for all of them. The prefix has the first ones already.
  const uint32_t all_see = own.size() - after - n + 1;
  PREFIXD_TRY(merge(0, n, plan.moved, all_see));
  for (uint32_t i = 1; i < n; ++i) PREFIXD_TRY(merge(i, 1, all_see, all_see + i));
  return {};
}

namespace {

uint32_t GroupOf(const GroupTask& task) {
  const PreparedPrefix& prefix = *task.plan->prefix;
  return prefix.model()->spec.geometry.group_size(prefix.layer_of(task.head));
}

// Bounds the queries of an exact pass that are attended with between two looks at the call's end:
// by products of elements, but at least so many, as fewer cost more each.
struct Piece {
  size_t products;
  uint32_t least;
};
constexpr Piece kPiece{1u << 28, 128};
constexpr Piece kSharedPiece{1u << 25, 16};  // where other tenants wait

// Computes exact attention of a task's queries over the whole prefix, streamed once, or the part of
// it that the turn allows.
class ExactVisit {
 public:
  ExactVisit(const StepParts& parts, GroupTask& task, uint32_t n_queries, StepTurn& turn)
      : parts_(parts),
        task_(task),
        pass_(task.exact),
        n_(n_queries),
        turn_(turn),
        prefix_(*task.plan->prefix),
        layer_(prefix_.layer_of(task.head)),
        row_(prefix_.row(task.head)),
        scratch_(parts.scratch.Acquire()),
        run_y_(Scratch::Take(scratch_->y, task.y.size())),
        run_lse_(Scratch::Take(scratch_->lse, task.lse.size())) {}

  // Returns whether the pass has ended. Charges bytes and time, not steps.
  Result<bool> Run() {
    if (pass_.queries > 0 && !pass_.first) {
      std::ranges::copy(pass_.y, run_y_.begin());
      std::ranges::copy(pass_.lse, run_lse_.begin());
    }
    const Times times{task_.ledger, compute_ns_};
    ReadCharge charge(task_.ledger);
    StageTimer timer(times.all_ns);
    const auto visit = [this](std::span<const RowRef> refs) { return Attend(refs); };
    const Status status =
        prefix_.stored().VisitRows(layer_, prefix_.kv_head_of(task_.head), scratch_->retrieved,
                                   visit, pass_.place, &charge.reads);
    if (stopped_) return false;
    PREFIXD_TRY(status);
    task_.ledger.logical_bytes +=
        storage::RowsBytes(prefix_.stored().parts(), row_, TokenRange{0, prefix_.n_tokens()});
    return true;
  }

 private:
  struct Times {  // charges also when something throws
    Ledger& ledger;
    const uint64_t& compute_ns;
    mutable uint64_t all_ns = 0;
    ~Times() {
      ledger.compute_ns += compute_ns;
      ledger.read_ns += all_ns - compute_ns;
    }
  };

  // Ends the visit, which goes on from here.
  Status Stop() {
    if (pass_.queries > 0 && !pass_.first) {
      pass_.y.assign(run_y_.begin(), run_y_.end());
      pass_.lse.assign(run_lse_.begin(), run_lse_.end());
    }
    stopped_ = true;
    return Error{Code::kCancelled, "another tenant's turn"};
  }

  Status Attend(std::span<const RowRef> refs) {
    StageTimer timer(compute_ns_);
    const RowsView rows = ScatteredRows(refs, row_);
    const size_t products = std::max<size_t>(1, rows.count * (row_.key_dim + row_.value_dim));
    while (pass_.queries < n_) {
      // The first piece of a turn is done in any case.
      if (std::exchange(worked_, true) && !turn_.GoesOn()) return Stop();
      PREFIXD_TRY(CheckCall());
      const Piece piece = turn_.shared() ? kSharedPiece : kPiece;
      const auto run =
          static_cast<uint32_t>(std::max<size_t>(piece.least, piece.products / products));
      const uint32_t some = std::min(run, n_ - pass_.queries);
      PREFIXD_TRY(AttendSome(rows, pass_.queries, some));
      pass_.queries += some;
    }
    pass_.queries = 0;
    if (std::exchange(pass_.first, false)) return {};
    for (uint32_t i = 0; i < n_; ++i) {
      const size_t at = size_t{i} * row_.value_dim;
      MergeStates(task_.y.subspan(at, row_.value_dim), &task_.lse[i],
                  run_y_.subspan(at, row_.value_dim), run_lse_[i]);
    }
    return {};
  }

  // Attends with queries [begin, begin + n): their sums do not depend on others'.
  Status AttendSome(const RowsView& rows, uint32_t begin, uint32_t n) {
    const auto to_y = pass_.first ? task_.y : run_y_;
    const auto to_lse = pass_.first ? task_.lse : run_lse_;
    return parts_.compute.AttendExact(
        task_.q.subspan(size_t{begin} * row_.key_dim, size_t{n} * row_.key_dim), n,
        prefix_.model()->spec.geometry.layers[layer_], rows,
        to_y.subspan(size_t{begin} * row_.value_dim, size_t{n} * row_.value_dim),
        to_lse.subspan(begin, n));
  }

  const StepParts& parts_;
  GroupTask& task_;
  PassState& pass_;
  const uint32_t n_;
  StepTurn& turn_;
  const PreparedPrefix& prefix_;
  const uint32_t layer_;
  const RowShape row_;
  const ScratchPool::Lease scratch_;
  const std::span<float> run_y_, run_lse_;  // states over one batch
  uint64_t compute_ns_ = 0;
  bool worked_ = false, stopped_ = false;
};

// Sets the status of a task that has attended over the prefix, and lets it attend over its own
// tokens. One that its call ended early counts for no step, and its session is charged with what it
// read all the same.
void End(const StepParts& parts, GroupTask& task, Status status) {
  if (status.ok() && task.own.size() > task.plan->moved) {
    const uint32_t n = task.n_queries == 0 ? 1 : task.n_queries / GroupOf(task);
    status = MergeOwn(parts, *task.plan, task.head, task.own, n, task.own_after, task.q, task.y,
                      task.lse, task.ledger);
  }
  if (task.n_queries == 0 && (status.ok() || !EndedEarly(status.error()))) task.ledger.steps += 1;
  task.status = std::move(status);
  task.done = true;
}

bool IsExact(const GroupTask& task) {
  return task.n_queries > 0 || task.plan->policy.mode == StepMode::kFull;
}

// Runs an exact pass, or a step in mode full.
void Exact(const StepParts& parts, GroupTask& task, StepTurn& turn) {
  const Partition& partition = task.plan->prefix->partition();
  const uint32_t group = GroupOf(task);
  const bool step = task.n_queries == 0;
  const auto ended = ExactVisit(parts, task, step ? group : task.n_queries, turn).Run();
  if (!ended.ok()) return End(parts, task, ended.error());
  if (!*ended) return;
  if (step) {
    task.rho_z.assign(group, 0);
    if (task.plan->policy.report_missing) task.missing.assign(group, {0, true});
    task.ledger.anchor_tokens += partition.anchor_count();
    task.ledger.retrieved_tokens += partition.mid.size();
  }
  End(parts, task, {});
}

// The usual case, which needs no lists.
void StepAlone(const StepParts& parts, GroupTask& task, StepTurn& turn) {
  const CarriedScope scope(&task.limits);
  if (Status goes_on = CheckCall(); !goes_on.ok()) return End(parts, task, std::move(goes_on));
  if (IsExact(task)) return Exact(parts, task, turn);
  RetrievingStep step(parts, task);
  auto search = step.Search();
  if (search) SearchGroups(task.head, {&*search, 1}, step.scratch().search);
  End(parts, task, step.Finish(search ? std::move(search->found) : Result<Selection>(Selection{})));
}

}  // namespace

void StepGroups(const StepParts& parts, std::span<GroupTask* const> tasks, StepTurn& turn) {
  if (tasks.size() == 1) return StepAlone(parts, *tasks.front(), turn);
  std::deque<RetrievingStep> steps;
  std::vector<GroupTask*> of_step;
  std::vector<GroupSearch> searches;
  std::vector<size_t> of_search;  // [searches] index into steps
  for (GroupTask* task : tasks) {
    const CarriedScope scope(&task->limits);
    if (Status goes_on = CheckCall(); !goes_on.ok()) {
      End(parts, *task, std::move(goes_on));
      continue;
    }
    if (IsExact(*task)) {
      Exact(parts, *task, turn);
      if (!turn.GoesOn()) return;
      continue;
    }
    of_step.push_back(task);
    auto search = steps.emplace_back(parts, *task).Search();
    if (!search) continue;
    of_search.push_back(steps.size() - 1);
    searches.push_back(*std::move(search));
  }
  // Nobody's limits end a search that others need: each task ends behind it.
  if (!searches.empty()) {
    SearchGroups(tasks.front()->head, searches, steps[of_search.front()].scratch().search);
  }
  for (size_t s = 0, next = 0; s < steps.size(); ++s) {
    Result<Selection> found = Selection{};
    if (next < of_search.size() && of_search[next] == s) found = std::move(searches[next++].found);
    const CarriedScope scope(&of_step[s]->limits);
    Status goes_on = CheckCall();
    End(parts, *of_step[s], goes_on.ok() ? steps[s].Finish(std::move(found)) : std::move(goes_on));
  }
}

}  // namespace prefixd
