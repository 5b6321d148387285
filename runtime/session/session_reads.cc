// Serves engines that compute attention themselves: rows, selections, summaries.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/session_arguments.h"
#include "runtime/session/session_impl.h"
#include "runtime/step/charges.h"
#include "runtime/step/retrieve.h"
#include "storage/segment/stored_part.h"

namespace prefixd {
namespace {

// On average: saying where shorter parts lie takes as long as copying them.
constexpr uint64_t kLeastBytesOfCopy = 128;

// Returns where the rows of the head with index `head` of the read's `heads` go.
storage::RowSink SinkOf(const LayerRead& read, const RowShape& row, uint32_t head, uint32_t heads) {
  const size_t key = row.key_bytes(), value = row.value_bytes(), n = read.slice.tokens.size();
  const bool by_token = read.slice.order == KvOrder::kTokenMajor;
  const size_t step = by_token ? heads : 1;        // distance between tokens
  const size_t first = head * (by_token ? 1 : n);  // the place of the head's first token
  return {read.k.subspan(first * key), step * key, read.v.subspan(first * value), step * value};
}

// Returns how long a read took that began at `begun`; reads that overlap share their time.
double SecondsSince(std::chrono::steady_clock::time_point begun,
                    std::atomic<std::chrono::steady_clock::time_point>& last) {
  const auto now = std::chrono::steady_clock::now();
  return std::chrono::duration<double>(now - std::max(begun, last.exchange(now))).count();
}

}  // namespace

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

Status SessionImpl::ReadLayers(std::span<const LayerRead> reads,
                               const std::function<bool(size_t)>& done) {
  PREFIXD_TRY(this->plan());  // it is attached
  for (const LayerRead& read : reads) {
    PREFIXD_TRY(CheckSlice(info_, read.slice, read.k.size(), read.v.size()));
  }
  for (size_t begin = 0, end = 0; begin < reads.size(); begin = end) {
    const CallScope scope(Limits());
    PREFIXD_ASSIGN(const auto plan, this->plan());
    end = SeriesEnd(reads, begin);
    PREFIXD_TRY(ReadStored(
        *plan, reads.subspan(begin, end - begin),
        [&](size_t i) { return done == nullptr || done(begin + i); }, WorkPriority::kStep));
  }
  return {};
}

// The heads of all reads are one loop, so that no thread waits at the end of a layer.
Status SessionImpl::ReadStored(const SessionPlan& plan, std::span<const LayerRead> reads,
                               const std::function<bool(size_t)>& done, WorkPriority priority) {
  struct Part {
    size_t read;
    uint32_t head, heads;  // of all heads of the read: which, and how many
    uint32_t kv_head;
  };
  std::vector<Part> parts;
  std::vector<uint32_t> left(reads.size());  // parts of each read that are not done
  uint64_t all = 0;
  for (size_t i = 0; i < reads.size(); ++i) {
    const LayerSlice& slice = reads[i].slice;
    PREFIXD_ASSIGN(const HeadRange range, ResolveHeads(info_.geometry, slice.layer, slice.heads));
    if (slice.tokens.size() == 0) continue;
    left[i] = range.n;
    for (uint32_t h = 0; h < range.n; ++h) parts.push_back({i, h, range.n, range.first + h});
    all += range.n * storage::RowsBytes(plan.prefix->stored().parts(),
                                        info_.geometry.row(slice.layer), slice.tokens);
  }
  std::mutex mutex;
  size_t announced = 0;  // guarded by mutex, as `left` and `ended` are
  bool ended = false;
  const auto announce = [&](const Part* part) -> Status {
    std::lock_guard lock(mutex);
    if (part != nullptr) --left[part->read];
    for (; !ended && announced < reads.size() && left[announced] == 0; ++announced) {
      ended = done != nullptr && !done(announced);
    }
    if (ended) return Error{Code::kCancelled, "the rest of the rows was not wanted any more"};
    return {};
  };
  PREFIXD_TRY(announce(nullptr));
  const auto begun = std::chrono::steady_clock::now();
  std::atomic<uint64_t> from_memory{0};
  const auto read_part = [&](size_t p) -> Status {
    const Part& part = parts[p];
    const LayerSlice& slice = reads[part.read].slice;
    const RowShape row = info_.geometry.row(slice.layer);
    storage::ReadStats stats;
    Status read = plan.prefix->stored().ReadRange(
        slice.layer, part.kv_head, slice.tokens, storage::RowPart::kRow,
        SinkOf(reads[part.read], row, part.head, part.heads), storage::RangeUse::kShared, &stats);
    ChargeRows(
        HeadOf(slice.layer, part.kv_head), stats, 0,
        read.ok() ? storage::RowsBytes(plan.prefix->stored().parts(), row, slice.tokens) : 0);
    from_memory += stats.bytes[static_cast<size_t>(Tier::kHost)];
    PREFIXD_TRY(std::move(read));
    return announce(&part);
  };
  PREFIXD_TRY(services_->pool.ParallelFor(parts.size(), read_part, priority));
  if (parts.empty() || priority == WorkPriority::kBackground) return {};
  const uint64_t host = std::min<uint64_t>(all, from_memory);
  services_->rates.NoteRead(host, all - host, SecondsSince(begun, *last_read_));
  return {};
}

Result<LayerInPlace> SessionImpl::FindLayerInPlace(const LayerRead& read) {
  const CallScope scope(Limits());
  const auto begun = std::chrono::steady_clock::now();
  PREFIXD_ASSIGN(const auto plan, this->plan());
  PREFIXD_ASSIGN(const HeadRange heads,
                 CheckSlice(info_, read.slice, read.k.size(), read.v.size()));
  const auto& [layer, tokens, all, order] = read.slice;
  const RowShape row = info_.geometry.row(layer);
  std::vector<storage::WantedRun> runs;
  for (uint32_t h = 0; h < heads.n; ++h) {
    runs.push_back({heads.first + h, SinkOf(read, row, h, heads.n)});
  }
  storage::ReadStats stats;
  PREFIXD_ASSIGN(storage::RunsInPlace found,
                 plan->prefix->stored().FindInPlace(layer, tokens, runs, &stats));
  const uint64_t bytes = storage::RowsBytes(plan->prefix->stored().parts(), row, tokens);
  if (heads.n * bytes < found.copies.size() * kLeastBytesOfCopy) {
    return Error{Code::kFailedPrecondition, "the rows lie one by one; read them"};
  }
  for (uint32_t h = 0; h < heads.n; ++h) {
    ChargeRows(HeadOf(layer, heads.first + h), h == 0 ? stats : storage::ReadStats(), 0, bytes);
  }
  // Whoever copies the rows lets go of them then: this is how long restoring them took.
  const auto note = [services = services_, last = last_read_, begun, all_bytes = heads.n * bytes,
                     hold = std::move(found.hold)](const void*) mutable {
    services->rates.NoteRead(all_bytes, 0, SecondsSince(begun, *last));
    hold.reset();
  };
  return LayerInPlace{std::move(found.copies),
                      {found.region_id, found.region, found.region_fd},
                      std::shared_ptr<const void>(this, note)};
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
  std::set<EstimatorVariant> charged{wanted};
  std::lock_guard lock(mutex_);
  AddReads(reads);
  if (!summaries.ok()) return std::move(summaries).error();
  const KeptSummary& kept = *summaries->at(wanted).at(head);
  if (plan_) {
    ChargeSummary(head, variant, &kept, charged);
    PREFIXD_TRY(TakeMemory(plan_->policy));
  }
  const EstimatorSummary& summary = kept.summary;
  if (const auto* phi = summary.phi()) return phi->Serialize();
  if (const auto* clusters = summary.clusters()) return clusters->Serialize();
  return summary.moment()->Serialize();
}

}  // namespace prefixd
