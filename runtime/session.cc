#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <utility>

#include "runtime/charges.h"
#include "runtime/choice.h"
#include "runtime/retrieve.h"
#include "runtime/session_impl.h"
#include "runtime/step.h"

namespace prefixd {
namespace {

Error WrongSize(const char* what, size_t got, size_t want) {
  return InvalidArgument(std::string(what) + " has " + std::to_string(got) +
                         " elements; this geometry takes " + std::to_string(want));
}

}  // namespace

SessionImpl::SessionImpl(std::shared_ptr<Core> core, SessionInfo info)
    : core_(std::move(core)), info_(std::move(info)) {}

SessionImpl::~SessionImpl() { Leave(); }

void SessionImpl::Leave() {
  if (counted_.exchange(false)) core_->sessions -= 1;
}

Result<std::shared_ptr<Session>> SessionImpl::Attach(std::shared_ptr<Core> core,
                                                     std::shared_ptr<PreparedPrefix> prefix,
                                                     const StepPolicy& policy,
                                                     std::chrono::steady_clock::time_point begun) {
  const Model& model = *prefix->model();
  const storage::PrefixInfo& stored = prefix->stored().info();
  SessionInfo info;
  info.id = core->sessions_total + 1;
  info.model = model.spec.name;
  info.tenant = stored.tenant;
  info.prefix = stored.id.ToString();
  info.n_tokens = prefix->n_tokens();
  info.geometry = model.spec.geometry;
  info.anchors = core->options.anchors;
  info.parts.assign(prefix->stored().parts().begin(), prefix->stored().parts().end());
  const uint64_t already = core->sessions.fetch_add(1);
  auto session = std::shared_ptr<SessionImpl>(new SessionImpl(std::move(core), std::move(info)));
  Core& c = *session->core_;
  if (already >= c.options.max_sessions) {
    return Error{Code::kResourceExhausted,
                 "there are " + std::to_string(already) +
                     " sessions already (max_sessions); detach some and try again"};
  }
  session->ledgers_.resize(prefix->heads());
  session->charged_.resize(prefix->heads());
  std::vector<storage::ReadStats> reads(prefix->heads());
  PREFIXD_ASSIGN(auto plan, MakePlan(c.rooms, prefix, policy, &reads));
  session->info_.id = c.sessions_total.fetch_add(1) + 1;
  session->info_.estimator = plan->estimator;
  session->info_.d_phi = prefix->has_phi_caches() ? prefix->maps()->d_phi : 0;
  PREFIXD_TRY(session->Adopt(std::move(plan), reads));
  session->info_.attach_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  return std::shared_ptr<Session>(std::move(session));
}

Result<std::shared_ptr<const SessionPlan>> SessionImpl::plan() const {
  std::lock_guard lock(mutex_);
  if (detached_) return Detached();
  return plan_;
}

Error SessionImpl::Detached() const {
  return {Code::kFailedPrecondition,
          "session " + std::to_string(info_.id) + " was detached; attach again"};
}

StepPolicy SessionImpl::policy() const {
  std::lock_guard lock(mutex_);
  return plan_ ? plan_->policy : StepPolicy{};
}

Status SessionImpl::SetPolicy(const StepPolicy& policy) {
  PREFIXD_ASSIGN(const auto old, plan());
  std::vector<storage::ReadStats> reads(old->prefix->heads());
  auto replacement = MakePlan(core_->rooms, old->prefix, policy, &reads);
  if (replacement.ok()) return Adopt(*std::move(replacement), reads);
  std::lock_guard lock(mutex_);
  AddReads(reads);
  return std::move(replacement).error();
}

Status SessionImpl::Adopt(std::shared_ptr<const SessionPlan> plan,
                          const std::vector<storage::ReadStats>& reads) {
  std::lock_guard lock(mutex_);
  if (detached_) return Detached();
  plan_ = std::move(plan);
  adaptive_.reset();
  if (plan_->policy.adaptive && !plan_->heads.empty()) {
    std::vector<uint32_t> k;
    for (const HeadPlan& head : plan_->heads) k.push_back(head.k);
    adaptive_ = std::make_shared<AdaptiveBudget>(std::move(k), info_.geometry.n_kv_heads,
                                                 plan_->prefix->partition().mid.size());
  }
  AddReads(reads);
  for (size_t head = 0; head < plan_->heads.size(); ++head) {
    ChargeSummary(head, plan_->heads[head].reads());
  }
  return {};
}

std::vector<uint32_t> SessionImpl::TakeTokens(const SessionPlan& plan, uint32_t layer) {
  const uint32_t n = info_.geometry.n_kv_heads;
  std::vector<uint32_t> k(n);
  if (plan.heads.empty()) return k;
  std::shared_ptr<AdaptiveBudget> adaptive;
  {
    std::lock_guard lock(mutex_);
    if (plan_.get() == &plan) adaptive = adaptive_;
  }
  if (adaptive) return adaptive->Take(layer);
  for (uint32_t h = 0; h < n; ++h) k[h] = plan.heads[size_t{layer} * n + h].k;
  return k;
}

void SessionImpl::NoteMissing(const SessionPlan& plan, size_t head, uint32_t k,
                              std::span<const float> rho_z) {
  std::shared_ptr<AdaptiveBudget> adaptive;
  {
    std::lock_guard lock(mutex_);
    if (plan_.get() == &plan) adaptive = adaptive_;
  }
  if (!adaptive) return;
  double mean = 0;
  for (float rho : rho_z) mean += rho / double(rho_z.size());
  adaptive->Note(head, mean, k);
}

void SessionImpl::AddReads(const std::vector<storage::ReadStats>& reads) {
  for (size_t head = 0; head < reads.size(); ++head) ChargeReads(reads[head], ledgers_[head]);
}

void SessionImpl::ChargeSummary(size_t head, const EstimatorVariant& estimator) {
  if (estimator.kind == EstimatorKind::kNone || plan_->prefix->partition().mid.size() == 0 ||
      !charged_[head].insert(estimator.Kept()).second) {
    return;
  }
  const Model& model = *plan_->prefix->model();
  const double row_bytes =
      storage::MeanRowBytes(plan_->prefix->stored().parts(), model.spec.geometry.row());
  const double tokens =
      EstimatorTokens(core_->options, model, estimator, plan_->prefix->maps(), row_bytes);
  const auto bytes = static_cast<uint64_t>(std::llround(tokens * row_bytes));
  Ledger& ledger = ledgers_[head];
  ledger.summary_tokens += tokens;
  ledger.logical_bytes += bytes;
  ledger.summary_bytes[static_cast<size_t>(estimator.kind)] += bytes;
}

void SessionImpl::ChargeRows(size_t head, const storage::ReadStats& reads, uint64_t tokens,
                             uint64_t bytes) {
  Ledger ledger;
  ledger.retrieved_tokens = tokens;
  ledger.logical_bytes = bytes;
  ChargeReads(reads, ledger);
  Charge(head, ledger);
}

void SessionImpl::Charge(size_t head, const Ledger& ledger) {
  std::lock_guard lock(mutex_);
  ledgers_[head] += ledger;
}

Status SessionImpl::CheckQueries(uint32_t layer, uint32_t n, std::span<const float> q,
                                 std::span<float> y, std::span<float> lse) const {
  const KvGeometry& geometry = info_.geometry;
  if (layer >= geometry.n_layers) {
    return InvalidArgument("layer " + std::to_string(layer) + " is not one of the model's " +
                           std::to_string(geometry.n_layers));
  }
  if (geometry.layers[layer].sliding_window > 0) {
    return Error{Code::kFailedPrecondition,
                 "layer " + std::to_string(layer) + " has a sliding window of " +
                     std::to_string(geometry.layers[layer].sliding_window) +
                     " tokens: its attention is the engine's own"};
  }
  const size_t heads = size_t{n} * geometry.n_q_heads;
  if (q.size() != heads * geometry.key_dim) {
    return WrongSize("q", q.size(), heads * geometry.key_dim);
  }
  if (y.size() != heads * geometry.value_dim) {
    return WrongSize("y", y.size(), heads * geometry.value_dim);
  }
  if (lse.size() != heads) return WrongSize("lse", lse.size(), heads);
  for (size_t i = 0; i < q.size(); ++i) {
    if (!std::isfinite(q[i])) {
      const size_t row = i / geometry.key_dim;
      return InvalidArgument("q of layer " + std::to_string(layer) + ", query " +
                             std::to_string(row / geometry.n_q_heads) + ", head " +
                             std::to_string(row % geometry.n_q_heads) + " is NaN or Inf");
    }
  }
  return {};
}

Result<size_t> SessionImpl::CheckHead(uint32_t layer, uint32_t kv_head) const {
  if (layer >= info_.geometry.n_layers || kv_head >= info_.geometry.n_kv_heads) {
    return InvalidArgument("layer " + std::to_string(layer) + ", KV head " +
                           std::to_string(kv_head) + " is not one of the model's " +
                           std::to_string(info_.geometry.n_layers) + " x " +
                           std::to_string(info_.geometry.n_kv_heads));
  }
  return size_t{layer} * info_.geometry.n_kv_heads + kv_head;
}

Status SessionImpl::CheckIds(std::span<const uint32_t> ids) const {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= info_.n_tokens || (i > 0 && ids[i] <= ids[i - 1])) {
      return InvalidArgument("ids must ascend and lie below " + std::to_string(info_.n_tokens) +
                             "; id " + std::to_string(i) + " is " + std::to_string(ids[i]));
    }
  }
  return {};
}

Status SessionImpl::CheckRange(TokenRange range) const {
  if (range.begin <= range.end && range.end <= info_.n_tokens) return {};
  return InvalidArgument("tokens " + std::to_string(range.begin) + ".." +
                         std::to_string(range.end) + " are not a run of the prefix's " +
                         std::to_string(info_.n_tokens));
}

Status SessionImpl::Step(uint32_t layer, std::span<const float> q, std::span<float> y,
                         std::span<float> lse, StepInfo* info) {
  StepRequest request{this, layer, q, y, lse, info, {}};
  StepBatch({&request, 1});
  return std::move(request.status);
}

Status SessionImpl::AttendExact(uint32_t layer, uint32_t n, std::span<const float> q,
                                std::span<float> y, std::span<float> lse) {
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_TRY(CheckQueries(layer, n, q, y, lse));
  if (n == 0) return {};
  const KvGeometry& geometry = info_.geometry;
  const size_t group = geometry.group_size();
  return core_->pool.ParallelFor(geometry.n_kv_heads, [&](size_t h) -> Status {
    const size_t head = size_t{layer} * geometry.n_kv_heads + h;
    const auto of_token = [&](size_t t) { return t * geometry.n_q_heads + h * group; };
    // This KV head's queries of all tokens, and their outputs, side by side.
    std::vector<float> head_q(n * group * geometry.key_dim);
    std::vector<float> head_y(n * group * geometry.value_dim), head_lse(n * group);
    for (size_t t = 0; t < n; ++t) {
      std::copy_n(q.data() + of_token(t) * geometry.key_dim, group * geometry.key_dim,
                  head_q.data() + t * group * geometry.key_dim);
    }
    Ledger ledger;
    const Status status = ExactGroup(*core_, *plan, head, static_cast<uint32_t>(n * group), head_q,
                                     head_y, head_lse, ledger);
    Charge(head, ledger);
    PREFIXD_TRY(status);
    for (size_t t = 0; t < n; ++t) {
      std::copy_n(head_y.data() + t * group * geometry.value_dim, group * geometry.value_dim,
                  y.data() + of_token(t) * geometry.value_dim);
      std::copy_n(head_lse.data() + t * group, group, lse.data() + of_token(t));
    }
    return {};
  });
}

Status SessionImpl::ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                             std::span<std::byte> out) {
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_ASSIGN(const size_t head, CheckHead(layer, kv_head));
  const size_t want = ids.size() * info_.geometry.row().bytes();
  if (out.size() != want) return WrongSize("out", out.size(), want);
  PREFIXD_TRY(CheckIds(ids));
  storage::ReadStats reads;
  Status status = plan->prefix->stored().ReadRows(layer, kv_head, ids, out, &reads);
  ChargeRows(head, reads, status.ok() ? ids.size() : 0,
             status.ok() ? storage::RowsBytes(info_.parts, info_.geometry.row(), ids) : 0);
  return status;
}

Result<BorrowedRows> SessionImpl::BorrowRows(uint32_t layer, uint32_t kv_head,
                                             std::span<const uint32_t> ids) {
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_ASSIGN(const size_t head, CheckHead(layer, kv_head));
  PREFIXD_TRY(CheckIds(ids));
  storage::ReadStats reads;
  auto rows = plan->prefix->stored().BorrowRows(layer, kv_head, ids, &reads);
  ChargeRows(head, reads, rows.ok() ? ids.size() : 0,
             rows.ok() ? storage::RowsBytes(info_.parts, info_.geometry.row(), ids) : 0);
  if (!rows.ok()) return std::move(rows).error();
  return BorrowedRows{std::move(rows->rows),
                      {rows->region_id, rows->region, rows->region_fd},
                      std::move(rows->hold)};
}

Status SessionImpl::ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range,
                              std::span<std::byte> out) {
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_ASSIGN(const size_t head, CheckHead(layer, kv_head));
  PREFIXD_TRY(CheckRange(range));
  const size_t want = range.size() * info_.geometry.row().bytes();
  if (out.size() != want) return WrongSize("out", out.size(), want);
  storage::ReadStats reads;
  Status status = plan->prefix->stored().ReadRange(layer, kv_head, range, out, &reads);
  ChargeRows(head, reads, 0,
             status.ok() ? storage::RowsBytes(info_.parts, info_.geometry.row(), range) : 0);
  return status;
}

Status SessionImpl::ReadLayer(const LayerSlice& slice, std::span<std::byte> k,
                              std::span<std::byte> v) {
  PREFIXD_ASSIGN(const auto plan, this->plan());
  const KvGeometry& g = info_.geometry;
  const RowShape row = g.row();
  PREFIXD_ASSIGN(const size_t first, CheckHead(slice.layer, slice.first_head));
  const uint32_t heads = slice.n_heads > 0 ? slice.n_heads : g.n_kv_heads - slice.first_head;
  if (heads > g.n_kv_heads - slice.first_head) {
    return InvalidArgument("KV heads " + std::to_string(slice.first_head) + ".." +
                           std::to_string(uint64_t{slice.first_head} + heads) +
                           " are not all among the model's " + std::to_string(g.n_kv_heads));
  }
  PREFIXD_TRY(CheckRange(slice.tokens));
  const size_t n = slice.tokens.size(), key = row.key_bytes(), value = row.value_bytes();
  if (k.size() != n * heads * key) return WrongSize("k", k.size(), n * heads * key);
  if (v.size() != n * heads * value) return WrongSize("v", v.size(), n * heads * value);
  if (n == 0) return {};
  const bool by_token = slice.order == KvOrder::kTokenMajor;
  return core_->pool.ParallelFor(heads, [&](size_t h) -> Status {
    const size_t step = by_token ? heads : 1;          // from token to token
    const size_t k_at = h * key * (by_token ? 1 : n);  // of the first
    const size_t v_at = h * value * (by_token ? 1 : n);
    storage::ReadStats reads;
    Status read = plan->prefix->stored().ReadRange(
        slice.layer, slice.first_head + static_cast<uint32_t>(h), slice.tokens,
        storage::RowPart::kRow, {k.subspan(k_at), step * key, v.subspan(v_at), step * value},
        &reads);
    ChargeRows(first + h, reads, 0,
               read.ok() ? storage::RowsBytes(info_.parts, row, slice.tokens) : 0);
    return read;
  });
}

Result<Selection> SessionImpl::Select(uint32_t layer, uint32_t kv_head, std::span<const float> q,
                                      uint32_t k) {
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_ASSIGN(const size_t head, CheckHead(layer, kv_head));
  const size_t want = size_t{info_.geometry.group_size()} * info_.geometry.key_dim;
  if (q.size() != want) return WrongSize("q", q.size(), want);
  if (!std::all_of(q.begin(), q.end(), [](float x) { return std::isfinite(x); })) {
    return InvalidArgument("q of layer " + std::to_string(layer) + ", KV head " +
                           std::to_string(kv_head) + " holds NaN or Inf");
  }
  Ledger ledger;
  const auto scratch = core_->rooms.scratch->Acquire();
  GroupSearch search{plan.get(), q, k, &ledger};
  SearchGroups(head, {&search, 1}, scratch->search);
  Charge(head, ledger);
  return std::move(search.found);
}

Result<std::vector<std::byte>> SessionImpl::SummaryBytes(uint32_t layer, uint32_t kv_head,
                                                         const EstimatorVariant& variant) {
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_ASSIGN(const size_t head, CheckHead(layer, kv_head));
  if (variant.kind == EstimatorKind::kNone || variant.kind == EstimatorKind::kAuto) {
    return InvalidArgument("estimator '" + variant.Name() + "' has no summary");
  }
  if (variant.kind == EstimatorKind::kPhi && !plan->prefix->maps() &&
      plan->prefix->model()->maps_error.empty()) {
    return Error{Code::kNotFound, "model '" + info_.model + "' has no feature maps"};
  }
  if (!plan->prefix->model()->Summarised(layer)) {
    return Error{Code::kFailedPrecondition,
                 "layer " + std::to_string(layer) + " has a softcap or window: it has no summary"};
  }
  if (variant.clustered() && plan->prefix->partition().mid.size() == 0) {
    return Error{Code::kFailedPrecondition,
                 "the anchors are all of this prefix: there is nothing to cluster"};
  }
  std::vector<storage::ReadStats> reads(plan->prefix->heads());
  auto summaries = plan->prefix->Summaries({&variant, 1}, &reads);
  std::lock_guard lock(mutex_);
  AddReads(reads);
  if (!summaries.ok()) return std::move(summaries).error();
  if (plan_) ChargeSummary(head, variant);
  const EstimatorSummary& summary = summaries->begin()->second->heads[head];
  if (const auto* phi = summary.phi()) return phi->Serialize();
  if (const auto* clusters = summary.clusters()) return clusters->Serialize();
  return summary.moment()->Serialize();
}

SessionReport SessionImpl::report() const {
  std::lock_guard lock(mutex_);
  SessionReport report{info_, {}, ledgers_};
  for (const Ledger& ledger : ledgers_) report.total += ledger;
  return report;
}

Result<SessionReport> SessionImpl::Detach() {
  std::shared_ptr<const SessionPlan> last;  // let go outside the lock
  {
    std::lock_guard lock(mutex_);
    if (detached_) return Detached();
    detached_ = true;
    last.swap(plan_);
  }
  last.reset();  // steps in flight keep their own hold
  Leave();
  return report();
}

}  // namespace prefixd
