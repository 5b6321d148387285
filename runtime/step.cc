#include "runtime/step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <string>

#include "attention/step.h"
#include "runtime/estimator_input.h"
#include "runtime/head_keys.h"
#include "runtime/session_impl.h"

namespace prefixd {
namespace {

// Adds the time since it was made to one of the ledger's stages.
class StageTimer {
 public:
  explicit StageTimer(uint64_t& ns) : ns_(ns) {}
  ~StageTimer() {
    ns_ += static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begun_).count());
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  uint64_t& ns_;
  const Clock::time_point begun_ = Clock::now();
};

// The tokens of the mid region whose values lie in the pages that reading `ids` takes anyway.
Status AddPageNeighbours(PreparedPrefix& prefix, size_t head, std::vector<uint32_t>& ids) {
  PREFIXD_ASSIGN(ids, prefix.stored().SharingPages(prefix.layer_of(head), prefix.kv_head_of(head),
                                                   ids, storage::RowPart::kValue));
  const TokenRange mid = prefix.partition().mid;
  std::erase_if(ids, [&](uint32_t id) { return id < mid.begin || id >= mid.end; });
  return {};
}

// Rows of `ids` where they lie, until this goes.
class RetrievedRows {
 public:
  explicit RetrievedRows(storage::RowViews& views) : views_(views) {}
  ~RetrievedRows() { views_.hold.reset(); }
  RetrievedRows(const RetrievedRows&) = delete;
  RetrievedRows& operator=(const RetrievedRows&) = delete;

  // Where their keys are in memory, or selection has just read them (`selected_keys`, densely;
  // empty: it has not), values alone are read. Borrows them.
  Status Read(PreparedPrefix& prefix, size_t head, std::span<const uint32_t> ids,
              std::span<const std::byte> selected_keys, storage::ReadStats& reads) {
    const size_t key_bytes = prefix.model()->spec.geometry.row().key_bytes();
    PREFIXD_ASSIGN(const HeadKeys keys, HeadKeys::Of(prefix, head, &reads));
    const bool selected = selected_keys.size() == ids.size() * key_bytes;
    const bool known = keys.resident() || selected;
    PREFIXD_TRY(prefix.stored().ViewRows(prefix.layer_of(head), prefix.kv_head_of(head), ids,
                                         known ? storage::RowPart::kValue : storage::RowPart::kRow,
                                         views_, &reads));
    for (size_t i = 0; known && i < ids.size(); ++i) {
      views_.rows[i].key = keys.resident()
                               ? keys.resident()->key(ids[i] - prefix.partition().mid.begin)
                               : selected_keys.data() + i * key_bytes;
    }
    return {};
  }
  RowsView rows(RowShape shape) const { return ScatteredRows(views_.rows, shape); }

 private:
  storage::RowViews& views_;
};

// Charges to the ledger what was read, also when the step fails afterwards.
class ReadCharge {
 public:
  explicit ReadCharge(Ledger& ledger) : ledger_(ledger) {}
  ~ReadCharge() { ChargeReads(reads, ledger_); }
  ReadCharge(const ReadCharge&) = delete;
  ReadCharge& operator=(const ReadCharge&) = delete;

  storage::ReadStats reads;

 private:
  Ledger& ledger_;
};

// What the step knows of what it has not read.
void Tell(const SessionPlan& plan, const GroupStepInput& in, std::span<const float> lse,
          std::span<const float> rho_z, GroupReport& report) {
  const uint64_t remaining = in.mid_count - in.retrieved.count;
  const bool known = remaining == 0 || in.estimator != EstimatorKind::kNone;
  for (uint32_t g = 0; g < in.group; ++g) {
    const float rho = known ? rho_z[g] : std::numeric_limits<float>::quiet_NaN();
    report.rho_z.push_back(rho);
    if (!plan.policy.report_missing) continue;
    // What was read: the merged state less the estimate.
    const bool merged = in.merge_estimate && in.estimator != EstimatorKind::kNone;
    const double lse_exact = merged ? lse[g] + std::log1p(-double{rho_z[g]}) : lse[g];
    report.missing.push_back(
        MissingMassOf(in.cuts.empty() ? Cut{} : in.cuts[g], remaining, lse_exact, rho));
  }
}

// Anchors and, in mode kRetrieve, the retrieved rows and the estimated remainder.
Status RetrieveGroup(const Core& core, const SessionPlan& plan, size_t head, uint32_t k,
                     std::span<const float> q, std::span<float> y, std::span<float> lse,
                     GroupReport& report) {
  Ledger& ledger = report.ledger;
  PreparedPrefix& prefix = *plan.prefix;
  const KvGeometry& geometry = prefix.model()->spec.geometry;
  const RowShape row = geometry.row();
  const uint32_t group = geometry.group_size(), layer = prefix.layer_of(head);
  const auto scratch = core.rooms.scratch->Acquire();
  ReadCharge charge(ledger);
  storage::ReadStats& reads = charge.reads;

  AnchorRows anchors;
  {
    StageTimer timer(ledger.read_ns);
    PREFIXD_ASSIGN(anchors, prefix.Anchors(head, &reads));
  }
  Selection selection;
  RetrievedRows retrieved(scratch->retrieved);
  const HeadPlan head_plan =
      plan.policy.mode == StepMode::kRetrieve ? plan.heads[head] : HeadPlan{};
  const bool scan = head_plan.estimator.kind == EstimatorKind::kScan;
  std::vector<float> scores;
  std::vector<std::byte>& found_keys = scratch->found_keys;
  found_keys.clear();
  if ((k > 0 || scan) && prefix.partition().mid.size() > 0) {
    PREFIXD_ASSIGN(selection, SelectGroup(plan, head, q, k, {scan ? &scores : nullptr, &found_keys},
                                          scratch->search, ledger));
    StageTimer timer(ledger.read_ns);
    if (plan.policy.page_granular) PREFIXD_TRY(AddPageNeighbours(prefix, head, selection.ids));
    PREFIXD_TRY(retrieved.Read(prefix, head, selection.ids, found_keys, reads));
  }

  GroupStepInput in;
  in.queries = q;
  in.group = group;
  in.layer = geometry.layers[layer];
  in.sinks = anchors.sinks;
  in.tail = anchors.tail;
  if (!selection.ids.empty()) in.retrieved = retrieved.rows(row);
  in.cuts = selection.cuts;
  in.mid_count = prefix.partition().mid.size();
  EstimatorInput estimator;
  std::vector<uint32_t> of_mid;  // the retrieved tokens, counted from the mid region's first
  if (in.mid_count > selection.ids.size() && head_plan.summaries) {
    const KeptSummaries& summaries = *head_plan.summaries;
    estimator.Attach(head_plan.reads(), summaries, prefix.maps(), geometry, head, in);
    if (head_plan.estimator.kind == EstimatorKind::kPhi && !selection.ids.empty()) {
      PREFIXD_ASSIGN(const TokenFeatures* features, prefix.Features(head, &reads));
      if (features) estimator.AttachFeatures(*features, selection.ids, in);
    }
    if (summaries.clusters) {
      PREFIXD_ASSIGN(HeadKeys keys, HeadKeys::Of(prefix, head, &reads));
      PREFIXD_ASSIGN(const auto clusters, summaries.clusters->OfMid(head, keys));
      for (uint32_t id : selection.ids) of_mid.push_back(id - prefix.partition().mid.begin);
      estimator.AttachClusters(clusters, of_mid, in);
      if (scan) estimator.AttachScan(clusters, scores, of_mid, in);
    }
  }
  in.merge_estimate = !head_plan.watched;
  const auto rho_z = Scratch::Take(scratch->rho_z, group);
  {
    StageTimer timer(ledger.compute_ns);
    PREFIXD_TRY(core.compute->Step(in, {y, lse, rho_z}, plan.weak_from_this().lock()));
  }
  ledger.anchor_tokens += prefix.partition().anchor_count();
  ledger.retrieved_tokens += selection.ids.size();
  ledger.charged_summary_tokens += head_plan.summary_tokens;
  if (in.features.data) {
    const uint64_t bytes = selection.ids.size() * in.features.stride;
    ledger.feature_bytes += bytes;
    ledger.logical_bytes += bytes;
    ledger.feature_tokens += static_cast<double>(bytes) / static_cast<double>(row.bytes());
  }
  const auto stored_bytes = [&](const auto& tokens) {
    return storage::RowsBytes(prefix.stored().parts(), row, tokens);
  };
  ledger.logical_bytes += stored_bytes(prefix.partition().sink) +
                          stored_bytes(prefix.partition().tail) + stored_bytes(selection.ids);
  for (float share : rho_z) ledger.rho_z_sum += in.merge_estimate ? share : 0;
  ledger.rho_z_count += group;
  Tell(plan, in, lse, rho_z, report);
  return {};
}

// One group of one request of a batch.
struct GroupTask {
  size_t request = 0;
  std::shared_ptr<const SessionPlan> plan;
  size_t head = 0;
  uint32_t k = 0;
  GroupReport report;
  Status status;
};

}  // namespace

void ChargeReads(const storage::ReadStats& reads, Ledger& ledger) {
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    ledger.physical_bytes[tier] += reads.bytes[tier];
  }
}

Result<Selection> SelectGroup(const SessionPlan& plan, size_t head, std::span<const float> q,
                              uint32_t k, const SelectMore& more, index::SearchScratch& scratch,
                              Ledger& ledger) {
  PreparedPrefix& prefix = *plan.prefix;
  const KvGeometry& geometry = prefix.model()->spec.geometry;
  ReadCharge charge(ledger);
  index::SearchRequest request;
  const index::KeyIndex* index = &prefix.exact();
  std::optional<HeadKeys> keys;
  {
    StageTimer timer(ledger.read_ns);
    // The index first: it is in memory in any case, keys only where there is room beside it.
    PREFIXD_ASSIGN(index, prefix.Index(head, plan.selector, &charge.reads));
    PREFIXD_ASSIGN(keys, HeadKeys::Of(prefix, head, &charge.reads));
  }
  keys->Into(request);
  request.scratch = &scratch;
  StageTimer timer(ledger.select_ns);
  request.queries = q;
  request.group = geometry.group_size();
  request.layer = geometry.layers[prefix.layer_of(head)];
  request.candidates = prefix.partition().mid;
  request.k = k;
  request.scores = more.scores;
  request.selected_keys = more.selected_keys;
  PREFIXD_ASSIGN(auto selection, index->Search(request));
  ledger.retrievals += 1;
  ledger.keys_scanned += selection.keys_scanned;
  ledger.scan_bytes += selection.bytes_scanned;
  return selection;
}

Status ExactGroup(const Core& core, const SessionPlan& plan, size_t head, uint32_t n_queries,
                  std::span<const float> q, std::span<float> y, std::span<float> lse,
                  Ledger& ledger) {
  const PreparedPrefix& prefix = *plan.prefix;
  const KvGeometry& geometry = prefix.model()->spec.geometry;
  const RowShape row = geometry.row();
  const uint32_t layer = prefix.layer_of(head), n = prefix.n_tokens();
  const auto scratch = core.rooms.scratch->Acquire();
  const auto run_y = Scratch::Take(scratch->y, y.size());
  const auto run_lse = Scratch::Take(scratch->lse, lse.size());
  ReadCharge charge(ledger);
  for (uint32_t at = 0, end = 0; at < n; at = end) {
    end = storage::RunEnd(prefix.stored().parts(), at, kRunTokens);
    const TokenRange run{at, end};
    const auto bytes = Scratch::Take(scratch->rows, run.size() * row.bytes());
    {
      StageTimer timer(ledger.read_ns);
      PREFIXD_TRY(
          prefix.stored().ReadRange(layer, prefix.kv_head_of(head), run, bytes, &charge.reads));
    }
    StageTimer timer(ledger.compute_ns);
    const RowsView rows{bytes.data(), run.size(), row.bytes(), row};
    if (at == 0) {
      PREFIXD_TRY(ExactAttention(q, n_queries, geometry.layers[layer], rows, y, lse));
      continue;
    }
    PREFIXD_TRY(ExactAttention(q, n_queries, geometry.layers[layer], rows, run_y, run_lse));
    for (uint32_t i = 0; i < n_queries; ++i) {
      const size_t first = size_t{i} * row.value_dim;
      MergeStates(y.subspan(first, row.value_dim), &lse[i], run_y.subspan(first, row.value_dim),
                  run_lse[i]);
    }
  }
  ledger.logical_bytes += storage::RowsBytes(prefix.stored().parts(), row, TokenRange{0, n});
  return {};
}

Status StepGroup(const Core& core, const SessionPlan& plan, size_t head, uint32_t k,
                 std::span<const float> q, std::span<float> y, std::span<float> lse,
                 GroupReport& report) {
  report.ledger.steps += 1;
  if (plan.policy.mode != StepMode::kFull) {
    return RetrieveGroup(core, plan, head, k, q, y, lse, report);
  }
  const Partition& partition = plan.prefix->partition();
  report.ledger.anchor_tokens += partition.anchor_count();
  report.ledger.retrieved_tokens += partition.mid.size();
  const uint32_t group = plan.prefix->model()->spec.geometry.group_size();
  report.rho_z.assign(group, 0);
  if (plan.policy.report_missing) report.missing.assign(group, {0, true});
  return ExactGroup(core, plan, head, group, q, y, lse, report.ledger);
}

void StepBatch(std::span<StepRequest> requests) {
  std::vector<GroupTask> tasks;
  Core* core = nullptr;
  for (size_t r = 0; r < requests.size(); ++r) {
    StepRequest& request = requests[r];
    auto* session = dynamic_cast<SessionImpl*>(request.session);
    if (!session) {
      request.status = InvalidArgument("a batch takes sessions attached to this process's store");
      continue;
    }
    auto plan = session->plan();
    request.status =
        plan.ok() ? session->CheckQueries(request.layer, 1, request.q, request.y, request.lse)
                  : Status(plan.error());
    if (!request.status.ok()) continue;
    if (core && core != session->core().get()) {
      request.status = InvalidArgument("all sessions of a batch must belong to one store");
      continue;
    }
    core = session->core().get();
    const uint32_t n_kv_heads = session->info().geometry.n_kv_heads;
    const std::vector<uint32_t> k = session->TakeTokens(**plan, request.layer);
    for (uint32_t h = 0; h < n_kv_heads; ++h) {
      tasks.push_back({r, *plan, size_t{request.layer} * n_kv_heads + h, k[h], {}, {}});
    }
  }
  if (tasks.empty()) return;
  static_cast<void>(core->pool.ParallelFor(tasks.size(), [&](size_t t) -> Status {
    GroupTask& task = tasks[t];
    const StepRequest& request = requests[task.request];
    const KvGeometry& geometry = task.plan->prefix->model()->spec.geometry;
    const size_t group = geometry.group_size();
    const size_t first = task.plan->prefix->kv_head_of(task.head) * group;
    task.status =
        StepGroup(*core, *task.plan, task.head, task.k,
                  request.q.subspan(first * geometry.key_dim, group * geometry.key_dim),
                  request.y.subspan(first * geometry.value_dim, group * geometry.value_dim),
                  request.lse.subspan(first, group), task.report);
    return {};  // each request has its own status
  }));
  for (StepRequest& request : requests) {
    if (request.info) *request.info = {};
  }
  for (GroupTask& task : tasks) {
    StepRequest& request = requests[task.request];
    auto* session = static_cast<SessionImpl*>(request.session);
    // What was read was read, also when it failed.
    session->Charge(task.head, task.report.ledger);
    if (task.status.ok()) session->NoteMissing(*task.plan, task.head, task.k, task.report.rho_z);
    if (!task.status.ok() && request.status.ok()) request.status = std::move(task.status);
    if (!request.info) continue;
    StepInfo& info = *request.info;
    info.ledger += task.report.ledger;
    info.rho_z.insert(info.rho_z.end(), task.report.rho_z.begin(), task.report.rho_z.end());
    info.missing.insert(info.missing.end(), task.report.missing.begin(), task.report.missing.end());
    if (task.plan->policy.mode != StepMode::kRetrieve) continue;
    info.k = std::max(info.k, task.k);
    info.k_per_head.push_back(task.k);
  }
  core->steps += std::count_if(requests.begin(), requests.end(),
                               [](const StepRequest& r) { return r.status.ok(); });
}

}  // namespace prefixd
