// Serves engines that compute attention themselves: rows, selections, summaries.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <string>
#include <utility>

#include "base/session_arguments.h"
#include "runtime/session/session_impl.h"
#include "runtime/step/charges.h"
#include "runtime/step/retrieve.h"
#include "storage/segment/stored_part.h"

namespace prefixd {

Status SessionImpl::CheckPrefixAlone(const SessionPlan& plan) const {
  if (own_memory_tokens_ == 0 || (own_.size() == 0 && plan.moved == 0)) return {};
  return Error{Code::kFailedPrecondition,
               "the session has own tokens, which move behind its prefix (own_memory_tokens): "
               "StepAppend and AttendExact attend over both; attach without own_memory_tokens to "
               "attend over the prefix alone"};
}

void SessionImpl::ChargeRows(size_t head, const storage::ReadStats& reads, uint64_t tokens,
                             uint64_t bytes) {
  Ledger ledger;
  ledger.retrieved_tokens = tokens;
  ledger.logical_bytes = bytes;
  ChargeReads(reads, ledger);
  Charge(head, ledger);
}

Status SessionImpl::ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                             std::span<std::byte> out) {
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_TRY(CheckHead(info_.geometry, layer, kv_head));
  const size_t head = HeadOf(layer, kv_head);
  const size_t want = ids.size() * info_.geometry.row(layer).bytes();
  PREFIXD_TRY(CheckSize("out", out.size(), want));
  PREFIXD_TRY(CheckIds(ids, info_.n_tokens));
  storage::ReadStats reads;
  Status status = plan->prefix->stored().ReadRows(layer, kv_head, ids, out, &reads);
  ChargeRows(head, reads, status.ok() ? ids.size() : 0,
             status.ok() ? storage::RowsBytes(info_.parts, info_.geometry.row(layer), ids) : 0);
  return status;
}

Result<RowsInPlace> SessionImpl::ReadInPlace(uint32_t layer, uint32_t kv_head,
                                             std::span<const uint32_t> ids) {
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_TRY(CheckHead(info_.geometry, layer, kv_head));
  const size_t head = HeadOf(layer, kv_head);
  PREFIXD_TRY(CheckIds(ids, info_.n_tokens));
  storage::ReadStats reads;
  auto rows = plan->prefix->stored().ReadInPlace(layer, kv_head, ids, &reads);
  ChargeRows(head, reads, rows.ok() ? ids.size() : 0,
             rows.ok() ? storage::RowsBytes(info_.parts, info_.geometry.row(layer), ids) : 0);
  if (!rows.ok()) return std::move(rows).error();
  return RowsInPlace{std::move(rows->rows),
                     {rows->region_id, rows->region, rows->region_fd},
                     std::move(rows->hold)};
}

Status SessionImpl::ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range,
                              std::span<std::byte> out) {
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_TRY(CheckHead(info_.geometry, layer, kv_head));
  const size_t head = HeadOf(layer, kv_head);
  PREFIXD_TRY(CheckRange(range, info_.n_tokens));
  const size_t want = range.size() * info_.geometry.row(layer).bytes();
  PREFIXD_TRY(CheckSize("out", out.size(), want));
  storage::ReadStats reads;
  Status status = plan->prefix->stored().ReadRange(layer, kv_head, range, out, &reads);
  ChargeRows(head, reads, 0,
             status.ok() ? storage::RowsBytes(info_.parts, info_.geometry.row(layer), range) : 0);
  return status;
}

Status SessionImpl::ReadLayer(const LayerSlice& slice, std::span<std::byte> k,
                              std::span<std::byte> v) {
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_TRY(CheckSlice(info_, slice, k.size(), v.size()));
  return ReadStored(*plan, slice, k, v);
}

Status SessionImpl::ReadStored(const SessionPlan& plan, const LayerSlice& slice,
                               std::span<std::byte> k, std::span<std::byte> v) {
  PREFIXD_ASSIGN(const HeadRange range, ResolveHeads(info_.geometry, slice.layer, slice.heads));
  const RowShape row = info_.geometry.row(slice.layer);
  const size_t first = HeadOf(slice.layer, range.first);
  const uint32_t heads = range.n;
  const size_t n = slice.tokens.size(), key = row.key_bytes(), value = row.value_bytes();
  if (n == 0) return {};
  const bool by_token = slice.order == KvOrder::kTokenMajor;
  const auto begun = std::chrono::steady_clock::now();
  std::atomic<uint64_t> from_memory{0};
  PREFIXD_TRY(services_->pool.ParallelFor(heads, [&](size_t h) -> Status {
    const size_t step = by_token ? heads : 1;          // distance between tokens
    const size_t k_at = h * key * (by_token ? 1 : n);  // offset of the head's first token
    const size_t v_at = h * value * (by_token ? 1 : n);
    storage::ReadStats reads;
    Status read = plan.prefix->stored().ReadRange(
        slice.layer, range.first + static_cast<uint32_t>(h), slice.tokens, storage::RowPart::kRow,
        {k.subspan(k_at), step * key, v.subspan(v_at), step * value}, &reads);
    ChargeRows(
        first + h, reads, 0,
        read.ok() ? storage::RowsBytes(plan.prefix->stored().parts(), row, slice.tokens) : 0);
    from_memory += reads.bytes[static_cast<size_t>(Tier::kHost)];
    return read;
  }));
  // Reads that overlap share their time.
  const auto ended = std::chrono::steady_clock::now();
  const auto from = std::max(begun, last_read_.exchange(ended));
  const std::chrono::duration<double> took = ended - from;
  const uint64_t all = heads * storage::RowsBytes(plan.prefix->stored().parts(), row, slice.tokens);
  const uint64_t host = std::min<uint64_t>(all, from_memory);
  services_->rates.NoteRead(host, all - host, took.count());
  return {};
}

Status SessionImpl::ReadTokens(TokenRange range, std::span<uint32_t> out) {
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_TRY(CheckRange(range, info_.n_tokens));
  PREFIXD_TRY(CheckSize("out", out.size(), range.size()));
  std::ranges::copy(plan->prefix->stored().tokens().subspan(range.begin, range.size()),
                    out.begin());
  return {};
}

Result<Selection> SessionImpl::Select(uint32_t layer, uint32_t kv_head, std::span<const float> q,
                                      uint32_t k) {
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_TRY(CheckPrefixAlone(*plan));
  PREFIXD_TRY(CheckHead(info_.geometry, layer, kv_head));
  const size_t head = HeadOf(layer, kv_head);
  const LayerShape shape = info_.geometry.layer(layer);
  const size_t want = size_t{shape.group_size()} * shape.key_dim;
  PREFIXD_TRY(CheckSize("q", q.size(), want));
  if (!std::all_of(q.begin(), q.end(), [](float x) { return std::isfinite(x); })) {
    return InvalidArgument("q of layer " + std::to_string(layer) + ", KV head " +
                           std::to_string(kv_head) + " holds NaN or Inf");
  }
  Ledger ledger;
  const auto scratch = services_->scratch.Acquire();
  GroupSearch search{plan.get(), q, k, &ledger};
  SearchGroups(head, {&search, 1}, scratch->search);
  Charge(head, ledger);
  return std::move(search.found);
}

Result<std::vector<std::byte>> SessionImpl::SummaryBytes(uint32_t layer, uint32_t kv_head,
                                                         const EstimatorVariant& variant) {
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_TRY(CheckPrefixAlone(*plan));
  PREFIXD_TRY(CheckHead(info_.geometry, layer, kv_head));
  const size_t head = HeadOf(layer, kv_head);
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
  const EstimatorVariant wanted = variant.Kept();
  auto summaries = plan->prefix->Summaries({{wanted, {head}}}, WorkPriority::kStep, &reads);
  std::lock_guard lock(mutex_);
  AddReads(reads);
  if (!summaries.ok()) return std::move(summaries).error();
  const KeptSummary& kept = *summaries->at(wanted).at(head);
  if (plan_) {
    ChargeSummary(head, variant, &kept);
    PREFIXD_TRY(TakeMemory(plan_->policy));
  }
  const EstimatorSummary& summary = kept.summary;
  if (const auto* phi = summary.phi()) return phi->Serialize();
  if (const auto* clusters = summary.clusters()) return clusters->Serialize();
  return summary.moment()->Serialize();
}

}  // namespace prefixd
