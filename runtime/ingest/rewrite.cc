#include "runtime/ingest/rewrite.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "index/code_search/row_order.h"
#include "runtime/derived/unread.h"
#include "runtime/ingest/compaction_preview.h"
#include "runtime/ingest/ingest.h"
#include "storage/segment/row_encoding.h"

namespace prefixd {
namespace {

using storage::SegmentId;

Status Recluster(storage::PrefixStore& store, const RuntimeOptions& options, const Model& model,
                 const SegmentId& id, WorkProgress& progress) {
  PREFIXD_ASSIGN(const storage::PrefixInfo info, store.GetPrefix(id));
  const Anchors anchors = options.anchors;
  storage::ReclusterOptions recluster;
  recluster.chunk_tokens = options.recluster_chunk_tokens;
  constexpr uint32_t kPageBytes = 4096;
  recluster.order = [&](uint32_t layer, uint32_t, uint32_t first,
                        std::span<const std::byte> rows) -> Result<std::vector<uint32_t>> {
    const RowShape row = model.spec.geometry.row(layer);
    const uint32_t value_bytes = storage::StoredRowBytes(row, info.encoding).value;
    const uint32_t rows_per_page = std::max(1u, kPageBytes / value_bytes);
    // Steps always read the anchors together, so sinks and tail lie side by side at the end of the
    // chunk, and the pages of the mid tokens begin with the chunk.
    const auto n = static_cast<uint32_t>(rows.size() / row.bytes());
    const uint32_t sinks = first == 0 ? std::min(n, anchors.n_sink) : 0;
    const uint32_t tail = first + n == info.n_tokens ? std::min(n - sinks, anchors.n_tail) : 0;
    const uint32_t mid = n - sinks - tail;
    const std::byte* mid_rows = rows.data() + sinks * row.bytes();
    std::vector<uint32_t> out =
        index::ClusterOrder({mid_rows, mid, row.bytes(), row}, rows_per_page);
    for (uint32_t& i : out) i += sinks;
    out.resize(n);
    std::iota(out.begin() + mid, out.begin() + mid + sinks, 0);
    std::iota(out.begin() + mid + sinks, out.end(), sinks + mid);
    return out;
  };
  recluster.progress = [&](uint64_t done, uint64_t total, std::string_view) {
    progress.done = done;
    progress.total = total;
    return progress.Check().ok();
  };
  return store.Recluster(id, recluster);
}

// Compacting pays off when the two are of like size: each token is then copied a logarithmic number
// of times, however many turns a conversation has.
bool WorthCompacting(const DerivedContext& context, const storage::PrefixInfo& leaf) {
  if (leaf.children > 0 || leaf.chain.size() < 2) return false;
  const auto parent = context.segments.GetPrefix(leaf.chain[leaf.chain.size() - 2]);
  return parent.ok() && parent->children == 1 && parent->own_tokens <= 2 * leaf.own_tokens &&
         parent->own_tokens + leaf.own_tokens <= context.options.compact_max_tokens;
}

// Ingests the compacted segment before the compaction commits: sessions always find the derived
// data of the two.
Result<SegmentId> Compact(storage::PrefixStore& store, const DerivedContext& context,
                          const Model& model, const SegmentId& leaf, WorkProgress& progress) {
  const uint32_t max_tokens = context.options.compact_max_tokens;
  PREFIXD_ASSIGN(const auto preview, CompactionPreview::Of(store, leaf, max_tokens));
  const auto samples = context.segments.GetBlob(leaf, kQueriesBlob, kQueriesProducer);
  if (!samples.ok() && Unread(samples.error())) return samples.error();
  if (samples.ok()) {  // without samples the prefix is merely untuned
    PREFIXD_TRY(preview->PutBlob(preview->id(), kQueriesBlob, kQueriesProducer, *samples));
  }
  PREFIXD_TRY(
      IngestSegment({*preview, context.options, context.pool, context.scratch, context.memory},
                    model, preview->id(), progress));
  return store.Compact(leaf, max_tokens, preview->TakeBlobs());
}

}  // namespace

Result<Rewritten> RewriteSegment(storage::PrefixStore& store, const DerivedContext& context,
                                 const Model& model, const SegmentId& id, WorkProgress& progress) {
  Rewritten out;
  PREFIXD_ASSIGN(const storage::PrefixInfo info, context.segments.GetPrefix(id));
  if (info.kept_rows > 0) return out;
  if (info.live) return out;  // its session joins what it moved (runtime/session/session_move.cc)
  if (WorthCompacting(context, info)) {
    const auto compacted = Compact(store, context, model, id, progress);
    if (compacted.ok()) {
      out.compacted = *compacted;
      out.gone = {info.chain[info.chain.size() - 2], id};
      return out;
    }
    if (compacted.error().code != Code::kFailedPrecondition &&
        compacted.error().code != Code::kResourceExhausted) {
      return compacted.error();
    }
  }
  if (info.reclustered || info.own_tokens < context.options.recluster_min_tokens) return out;
  Status reclustered = Recluster(store, context.options, model, id, progress);
  out.reclustered = reclustered.ok();
  if (reclustered.ok() || reclustered.error().code == Code::kResourceExhausted ||
      reclustered.error().code == Code::kUnavailable) {
    return out;
  }
  return std::move(reclustered).error();
}

Status ReclusterNow(storage::PrefixStore& store, const DerivedContext& context, const Model& model,
                    const SegmentId& id, WorkProgress& progress) {
  return Recluster(store, context.options, model, id, progress);
}

Result<SegmentId> CompactNow(storage::PrefixStore& store, const DerivedContext& context,
                             const Model& model, const SegmentId& leaf, WorkProgress& progress) {
  return Compact(store, context, model, leaf, progress);
}

}  // namespace prefixd
