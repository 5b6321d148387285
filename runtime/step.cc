#include "runtime/step.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string>

#include "attention/step.h"
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

// Rows of `ids`: their keys are in memory since the selection, so that values alone are read.
Status ReadRetrieved(PreparedPrefix& prefix, size_t head, std::span<const uint32_t> ids,
                     std::span<std::byte> rows, storage::ReadStats& reads) {
  const RowShape row = prefix.model()->spec.geometry.row();
  PREFIXD_ASSIGN(const RowsView keys, prefix.MidKeys(head, &reads));
  for (size_t i = 0; i < ids.size(); ++i) {
    std::memcpy(rows.data() + i * row.bytes(),
                keys.data + (ids[i] - prefix.partition().mid.begin) * keys.stride, row.key_bytes());
  }
  return prefix.stored().ReadRows(prefix.layer_of(head), prefix.kv_head_of(head), ids,
                                  storage::RowPart::kValue,
                                  {rows.subspan(row.key_bytes()), row.bytes()}, &reads);
}

// Anchors and, in mode kRetrieve, the retrieved rows and the estimated remainder.
Status RetrieveGroup(const Core& core, const SessionPlan& plan, size_t head,
                     std::span<const float> q, std::span<float> y, std::span<float> lse,
                     Ledger& ledger) {
  PreparedPrefix& prefix = *plan.prefix;
  const KvGeometry& geometry = prefix.model()->spec.geometry;
  const RowShape row = geometry.row();
  const uint32_t group = geometry.group_size(), layer = prefix.layer_of(head);
  const auto scratch = core.rooms.scratch->Acquire();
  storage::ReadStats reads;

  AnchorRows anchors;
  {
    StageTimer timer(ledger.read_ns);
    PREFIXD_ASSIGN(anchors, prefix.Anchors(head, &reads));
  }
  Selection selection;
  std::span<std::byte> retrieved;
  const HeadPlan head_plan =
      plan.policy.mode == StepMode::kRetrieve ? plan.heads[head] : HeadPlan{};
  if (head_plan.k > 0 && prefix.partition().mid.size() > 0) {
    PREFIXD_ASSIGN(selection, SelectGroup(plan, head, q, head_plan.k, ledger));
    StageTimer timer(ledger.read_ns);
    if (plan.policy.page_granular) PREFIXD_TRY(AddPageNeighbours(prefix, head, selection.ids));
    retrieved = Scratch::Take(scratch->rows, selection.ids.size() * row.bytes());
    PREFIXD_TRY(ReadRetrieved(prefix, head, selection.ids, retrieved, reads));
  }

  GroupStepInput in;
  in.queries = q;
  in.group = group;
  in.layer = geometry.layers[layer];
  in.sinks = anchors.sinks;
  in.tail = anchors.tail;
  in.retrieved = {retrieved.data(), selection.ids.size(), row.bytes(), row};
  in.cuts = selection.cuts;
  in.mid_count = prefix.partition().mid.size();
  if (in.mid_count > selection.ids.size()) in.estimator = head_plan.estimator;
  if (in.estimator == EstimatorKind::kMoment) in.moment = &(*plan.moments)[head];
  if (in.estimator == EstimatorKind::kPhi) {
    const FeatureMapSet& maps = *prefix.maps();
    const size_t first_q = size_t{layer} * geometry.n_q_heads + prefix.kv_head_of(head) * group;
    in.phi = &(*plan.phi)[head];
    in.phi_q = std::span(maps.phi_q).subspan(first_q, group);
    in.phi_k = &maps.phi_k[head];
  }
  const auto rho_z = Scratch::Take(scratch->rho_z, group);
  {
    StageTimer timer(ledger.compute_ns);
    PREFIXD_TRY(core.compute->Step(in, {y, lse, rho_z}, plan.weak_from_this().lock()));
  }
  ledger.anchor_tokens += prefix.partition().anchor_count();
  ledger.retrieved_tokens += selection.ids.size();
  ledger.charged_summary_tokens += head_plan.summary_tokens;
  ledger.logical_bytes += (prefix.partition().anchor_count() + selection.ids.size()) * row.bytes();
  for (float share : rho_z) ledger.rho_z_sum += share;
  ledger.rho_z_count += group;
  ChargeReads(reads, ledger);
  return {};
}

// One group of one request of a batch.
struct GroupTask {
  size_t request = 0;
  std::shared_ptr<const SessionPlan> plan;
  size_t head = 0;
  Ledger ledger;
  Status status;
};

}  // namespace

void ChargeReads(const storage::ReadStats& reads, Ledger& ledger) {
  for (size_t tier = 0; tier < kTierCount; ++tier) {
    ledger.physical_bytes[tier] += reads.bytes[tier];
  }
}

Result<Selection> SelectGroup(const SessionPlan& plan, size_t head, std::span<const float> q,
                              uint32_t k, Ledger& ledger) {
  PreparedPrefix& prefix = *plan.prefix;
  const KvGeometry& geometry = prefix.model()->spec.geometry;
  storage::ReadStats reads;
  index::SearchRequest request;
  const index::KeyIndex* index = &prefix.exact();
  {
    StageTimer timer(ledger.read_ns);
    PREFIXD_ASSIGN(request.keys, prefix.MidKeys(head, &reads));
    if (plan.ivf) {
      PREFIXD_ASSIGN(index, prefix.Ivf(head, &reads));
    }
  }
  ChargeReads(reads, ledger);
  StageTimer timer(ledger.select_ns);
  request.queries = q;
  request.group = geometry.group_size();
  request.layer = geometry.layers[prefix.layer_of(head)];
  request.candidates = prefix.partition().mid;
  request.k = k;
  request.first_token = prefix.partition().mid.begin;
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
  storage::ReadStats reads;
  for (uint32_t at = 0, end = 0; at < n; at = end) {
    end = prefix.stored().RunEnd(at, kRunTokens);
    const TokenRange run{at, end};
    const auto bytes = Scratch::Take(scratch->rows, run.size() * row.bytes());
    {
      StageTimer timer(ledger.read_ns);
      PREFIXD_TRY(prefix.stored().ReadRange(layer, prefix.kv_head_of(head), run, bytes, &reads));
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
  ledger.logical_bytes += n * row.bytes();
  ChargeReads(reads, ledger);
  return {};
}

Status StepGroup(const Core& core, const SessionPlan& plan, size_t head, std::span<const float> q,
                 std::span<float> y, std::span<float> lse, Ledger& ledger) {
  ledger.steps += 1;
  if (plan.policy.mode != StepMode::kFull) {
    return RetrieveGroup(core, plan, head, q, y, lse, ledger);
  }
  const Partition& partition = plan.prefix->partition();
  ledger.anchor_tokens += partition.anchor_count();
  ledger.retrieved_tokens += partition.mid.size();
  return ExactGroup(core, plan, head, plan.prefix->model()->spec.geometry.group_size(), q, y, lse,
                    ledger);
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
    for (uint32_t h = 0; h < n_kv_heads; ++h) {
      tasks.push_back({r, *plan, size_t{request.layer} * n_kv_heads + h, {}, {}});
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
        StepGroup(*core, *task.plan, task.head,
                  request.q.subspan(first * geometry.key_dim, group * geometry.key_dim),
                  request.y.subspan(first * geometry.value_dim, group * geometry.value_dim),
                  request.lse.subspan(first, group), task.ledger);
    return {};  // each request has its own status
  }));
  for (StepRequest& request : requests) {
    if (request.info) *request.info = {};
  }
  for (GroupTask& task : tasks) {
    StepRequest& request = requests[task.request];
    auto* session = static_cast<SessionImpl*>(request.session);
    session->Charge(task.head, task.ledger);  // what was read was read, also when it failed
    if (!task.status.ok() && request.status.ok()) request.status = std::move(task.status);
    if (request.info) {
      request.info->ledger += task.ledger;
      if (task.plan->policy.mode == StepMode::kRetrieve) {
        request.info->k = std::max(request.info->k, task.plan->heads[task.head].k);
      }
    }
  }
  core->steps += std::count_if(requests.begin(), requests.end(),
                               [](const StepRequest& r) { return r.status.ok(); });
}

}  // namespace prefixd
