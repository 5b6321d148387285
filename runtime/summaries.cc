#include "runtime/summaries.h"

#include <algorithm>
#include <charconv>
#include <optional>

#include "runtime/blob_pack.h"

namespace prefixd {
namespace {

std::string AnchorsText(Anchors anchors) {
  return " sinks=" + std::to_string(anchors.n_sink) + " tail=" + std::to_string(anchors.n_tail);
}

size_t HeadCount(const Model& model) {
  return size_t{model.spec.geometry.n_layers} * model.spec.geometry.n_kv_heads;
}

// Adds the rows of `range` to the summary of one head, run by run.
template <typename Kind>
Status AddRange(const Rooms& rooms, const Kind& kind, const storage::StoredPrefix& prefix,
                uint32_t head, TokenRange range, typename Kind::Summary& to,
                storage::ReadStats* reads, const WorkProgress* progress) {
  const KvGeometry& geometry = kind.model().spec.geometry;
  const RowShape row = geometry.row();
  const uint32_t layer = head / geometry.n_kv_heads, kv_head = head % geometry.n_kv_heads;
  const auto scratch = rooms.scratch->Acquire();
  for (uint32_t at = range.begin; at < range.end;) {
    if (progress) PREFIXD_TRY(progress->Check());
    const TokenRange run{at, std::min(range.end, storage::RunEnd(prefix.parts(), at, kRunTokens))};
    const auto bytes = Scratch::Take(scratch->rows, run.size() * row.bytes());
    PREFIXD_TRY(prefix.ReadRange(layer, kv_head, run, bytes, reads));
    kind.Add(to, layer, kv_head, {bytes.data(), run.size(), row.bytes(), row});
    at = run.end;
  }
  return {};
}

template <typename Kind>
Result<std::vector<typename Kind::Summary>> Decode(const Kind& kind,
                                                   std::span<const std::byte> blob,
                                                   std::vector<storage::ReadStats>* reads) {
  const size_t heads = HeadCount(kind.model());
  PREFIXD_ASSIGN(const auto entries, UnpackBlob(blob, heads));
  std::vector<typename Kind::Summary> summaries(heads, kind.Empty());
  for (size_t head = 0; head < heads; ++head) {
    if (entries[head].empty()) continue;
    PREFIXD_ASSIGN(summaries[head], Kind::Summary::Deserialize(entries[head]));
    if (reads) (*reads)[head].bytes[static_cast<size_t>(Tier::kSsd)] += entries[head].size();
  }
  return summaries;
}

// Positions of the checkpoints of this kind beside a segment, descending.
template <typename Kind>
std::vector<uint32_t> StoredPositions(const Rooms& rooms, const Kind& kind,
                                      const storage::SegmentId& id) {
  std::vector<uint32_t> positions;
  const std::string prefix = kind.prefix();
  for (const std::string& name : rooms.storage->ListBlobs(id)) {
    uint32_t position = 0;
    const char* end = name.data() + name.size();
    if (!name.starts_with(prefix)) continue;
    const auto parsed = std::from_chars(name.data() + prefix.size(), end, position);
    if (parsed.ec == std::errc() && parsed.ptr == end) positions.push_back(position);
  }
  std::sort(positions.rbegin(), positions.rend());
  return positions;
}

}  // namespace

Status WorkProgress::Check() const {
  if (cancelled.load(std::memory_order_relaxed)) {
    return Error{Code::kCancelled, "background work was stopped"};
  }
  return {};
}

Result<std::vector<SegmentPart>> ChainParts(const storage::PrefixStore& storage,
                                            const storage::PrefixInfo& prefix, uint32_t n_tokens) {
  std::vector<SegmentPart> parts;
  for (const storage::SegmentId& id : prefix.chain) {
    PREFIXD_ASSIGN(const auto info, storage.GetPrefix(id));
    const TokenRange stored{info.n_tokens - info.own_tokens, info.n_tokens};
    // A segment may begin before its parent's end: from there on the parent is not used.
    while (!parts.empty() && parts.back().used.end > stored.begin) {
      parts.back().used.end = std::max(parts.back().used.begin, stored.begin);
      if (parts.back().used.size() > 0) break;
      parts.pop_back();
    }
    if (stored.begin >= n_tokens) break;
    parts.push_back({id, stored, {stored.begin, std::min(stored.end, n_tokens)}});
  }
  return parts;
}

std::vector<uint32_t> CheckpointPositions(TokenRange segment, Anchors anchors,
                                          uint32_t checkpoint_tokens) {
  std::vector<uint32_t> positions;
  const uint32_t first = std::max(segment.begin, anchors.n_sink);
  const auto add = [&](uint64_t position) {
    if (position > first && position <= segment.end) positions.push_back(uint32_t(position));
  };
  for (uint64_t p = uint64_t{segment.begin} + checkpoint_tokens; p < segment.end;
       p += checkpoint_tokens) {
    add(p);
  }
  if (segment.end > anchors.n_tail) add(segment.end - anchors.n_tail);
  add(segment.end);
  std::sort(positions.begin(), positions.end());
  positions.erase(std::unique(positions.begin(), positions.end()), positions.end());
  return positions;
}

MomentKind::MomentKind(const Model& model, Anchors anchors, bool with_cross)
    : model_(model),
      with_cross_(with_cross),
      producer_("moments/1" + AnchorsText(anchors) + " cross=" + (with_cross ? "1" : "0")) {}

MomentSummary MomentKind::Empty() const {
  const KvGeometry& geometry = model_.spec.geometry;
  return MomentSummary(geometry.key_dim, geometry.value_dim, with_cross_);
}

void MomentKind::Add(Summary& to, uint32_t, uint32_t, const RowsView& rows) const { to.Add(rows); }

PhiKind::PhiKind(const Model& model, const FeatureMapSet& maps, Anchors anchors)
    : model_(model),
      maps_(maps),
      producer_("phi/1" + AnchorsText(anchors) + " maps=" + maps.digest) {}

PhiCache PhiKind::Empty() const { return PhiCache(maps_.d_phi, model_.spec.geometry.value_dim); }

void PhiKind::Add(Summary& to, uint32_t layer, uint32_t kv_head, const RowsView& rows) const {
  to.Add(rows, maps_.phi_k[size_t{layer} * model_.spec.geometry.n_kv_heads + kv_head]);
}

template <typename Kind>
Status BuildCheckpoints(const Rooms& rooms, const Kind& kind, const storage::StoredPrefix& prefix,
                        const SegmentPart& segment, Anchors anchors, uint32_t checkpoint_tokens,
                        WorkProgress& progress) {
  const size_t heads = HeadCount(kind.model());
  const uint32_t n_kv_heads = kind.model().spec.geometry.n_kv_heads;
  std::vector<typename Kind::Summary> sums(heads, kind.Empty());
  uint32_t at = std::max(segment.stored.begin, anchors.n_sink);
  for (uint32_t position : CheckpointPositions(segment.stored, anchors, checkpoint_tokens)) {
    PREFIXD_TRY(progress.Check());
    const std::string name = kind.BlobName(position);
    if (auto blob = rooms.storage->GetBlob(segment.id, name, kind.producer()); blob.ok()) {
      if (auto stored = Decode(kind, *blob, nullptr); stored.ok()) {
        sums = std::move(stored).value();
        at = position;
        progress.done += heads;
        continue;
      }
    }
    std::vector<std::vector<std::byte>> entries(heads);
    const auto extend = [&](size_t head) -> Status {
      if (kind.model().Summarised(static_cast<uint32_t>(head) / n_kv_heads)) {
        PREFIXD_TRY(AddRange(rooms, kind, prefix, static_cast<uint32_t>(head), {at, position},
                             sums[head], nullptr, &progress));
        entries[head] = sums[head].Serialize();
      }
      ++progress.done;
      return {};
    };
    PREFIXD_TRY(rooms.pool->ParallelFor(heads, extend, WorkPriority::kBackground));
    PREFIXD_TRY(rooms.storage->PutBlob(segment.id, name, kind.producer(), PackBlob(entries)));
    at = position;
  }
  return {};
}

template <typename Kind>
Result<std::vector<typename Kind::Summary>> AssembleSummaries(
    const Rooms& rooms, const Kind& kind, const storage::StoredPrefix& prefix,
    const std::vector<SegmentPart>& parts, TokenRange mid, uint64_t max_added,
    WorkPriority priority, std::vector<storage::ReadStats>* reads) {
  const size_t heads = HeadCount(kind.model());
  const uint32_t n_kv_heads = kind.model().spec.geometry.n_kv_heads;
  std::vector<typename Kind::Summary> sums(heads, kind.Empty());
  std::vector<TokenRange> to_add;  // behind each segment's checkpoint
  for (const SegmentPart& part : parts) {
    const uint32_t begin = std::max(part.used.begin, mid.begin);
    const uint32_t end = std::min(part.used.end, mid.end);
    if (begin >= end) continue;
    uint32_t at = begin;
    for (uint32_t position : StoredPositions(rooms, kind, part.id)) {
      if (position > end || position <= begin) continue;
      // A checkpoint that another producer made, or that is damaged, counts as not there: rows
      // are the truth, summaries are derived from them.
      auto blob = rooms.storage->GetBlob(part.id, kind.BlobName(position), kind.producer());
      if (!blob.ok()) continue;
      auto stored = Decode(kind, *blob, reads);
      if (!stored.ok()) continue;
      for (size_t head = 0; head < heads; ++head) sums[head].Merge((*stored)[head]);
      at = position;
      break;
    }
    if (end - at > max_added) {
      return Error{Code::kFailedPrecondition,
                   "the summaries of tokens " + std::to_string(at) + ".." + std::to_string(end) +
                       " are not built yet; wait until the prefix is ready (WaitReady) or attach "
                       "with estimator \"none\""};
    }
    if (end > at) to_add.push_back({at, end});
  }
  if (to_add.empty()) return sums;
  const auto add = [&](size_t head) -> Status {
    if (!kind.model().Summarised(static_cast<uint32_t>(head) / n_kv_heads)) return {};
    for (TokenRange range : to_add) {
      PREFIXD_TRY(AddRange(rooms, kind, prefix, static_cast<uint32_t>(head), range, sums[head],
                           reads ? &(*reads)[head] : nullptr, nullptr));
    }
    return {};
  };
  PREFIXD_TRY(rooms.pool->ParallelFor(heads, add, priority));
  return sums;
}

template Status BuildCheckpoints(const Rooms&, const MomentKind&, const storage::StoredPrefix&,
                                 const SegmentPart&, Anchors, uint32_t, WorkProgress&);
template Status BuildCheckpoints(const Rooms&, const PhiKind&, const storage::StoredPrefix&,
                                 const SegmentPart&, Anchors, uint32_t, WorkProgress&);
template Result<std::vector<MomentSummary>> AssembleSummaries(const Rooms&, const MomentKind&,
                                                              const storage::StoredPrefix&,
                                                              const std::vector<SegmentPart>&,
                                                              TokenRange, uint64_t, WorkPriority,
                                                              std::vector<storage::ReadStats>*);
template Result<std::vector<PhiCache>> AssembleSummaries(const Rooms&, const PhiKind&,
                                                         const storage::StoredPrefix&,
                                                         const std::vector<SegmentPart>&,
                                                         TokenRange, uint64_t, WorkPriority,
                                                         std::vector<storage::ReadStats>*);

}  // namespace prefixd
