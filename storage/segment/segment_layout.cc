#include "storage/segment/segment_layout.h"

#include <limits>
#include <string>

namespace prefixd::storage {
namespace {

uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

Status CheckRows(const LayerRows& rows) {
  // The bound keeps every sum below from overflowing.
  constexpr uint32_t kMaxItemBytes = 1u << 24;
  if (rows.key_bytes == 0 || rows.value_bytes == 0) {
    return InvalidArgument("a segment needs layers, KV heads, keys, values and tokens");
  }
  if (rows.key_bytes > kMaxItemBytes || rows.value_bytes > kMaxItemBytes) {
    return InvalidArgument("keys and values have at most 16 MiB");
  }
  return {};
}

RunLayout RunOf(const SegmentLayout& l, const LayerRows& rows) {
  RunLayout run;
  run.rows = rows;
  if (rows.n_kv_heads == 0) return run;
  run.row = ItemPages::Of(run.row_bytes());
  run.key = ItemPages::Of(rows.key_bytes);
  run.value = ItemPages::Of(rows.value_bytes);
  if (l.reclustered()) {
    run.pages_per_chunk =
        run.key.pages(l.shape.chunk_tokens) + run.value.pages(l.shape.chunk_tokens);
    const uint32_t last = l.chunk_size(l.chunks() - 1);
    run.pages_per_run =
        (l.chunks() - 1) * run.pages_per_chunk + run.key.pages(last) + run.value.pages(last);
  } else {
    run.pages_per_run = run.row.pages(l.rows());
  }
  return run;
}

}  // namespace

ItemPages ItemPages::Of(uint32_t item_bytes) {
  return {item_bytes, std::max<uint32_t>(1, static_cast<uint32_t>(kPageBytes / item_bytes)),
          static_cast<uint32_t>(CeilDiv(item_bytes, kPageBytes))};
}

Result<SegmentLayout> SegmentLayout::Of(const SegmentShape& shape) {
  if (shape.n_layers == 0 || shape.n_kv_heads == 0 || shape.n_tokens == 0 ||
      (!shape.layers.empty() && shape.layers.size() != shape.n_layers)) {
    return InvalidArgument("a segment needs layers, KV heads, keys, values and tokens");
  }
  const LayerRows models{shape.n_kv_heads, shape.key_bytes, shape.value_bytes};
  PREFIXD_TRY(CheckRows(models));
  if (shape.chunk_tokens > kMaxChunkTokens) {
    return InvalidArgument("a chunk has at most " + std::to_string(kMaxChunkTokens) + " tokens");
  }
  if (shape.kept_rows > 0 && (shape.kept_rows >= shape.n_tokens || shape.chunk_tokens > 0)) {
    return InvalidArgument("a compressed segment has fewer rows than tokens, in arrival layout");
  }
  constexpr uint64_t kMaxPages = std::numeric_limits<uint32_t>::max();
  const Error too_large = InvalidArgument("a segment of " + std::to_string(shape.n_tokens) +
                                          " tokens of this geometry exceeds 2^32 pages");
  SegmentLayout l;
  l.shape = shape;
  if (l.reclustered()) l.pages_per_order = CeilDiv(shape.n_tokens, kSlotsPerPage);
  if (l.compressed()) l.pages_per_order = CeilDiv(shape.kept_rows, kTokensPerPage);
  l.kinds.push_back(RunOf(l, models));
  unsigned __int128 runs = 0, row_pages = 0;
  if (shape.layers.empty()) {
    runs = static_cast<unsigned __int128>(shape.n_layers) * shape.n_kv_heads;
    row_pages = runs * l.kinds[0].pages_per_run;
    l.heads = HeadIndex(shape.n_layers, shape.n_kv_heads);
  }
  std::vector<uint32_t> heads;
  for (const LayerRows& rows : shape.layers) {
    if (rows.n_kv_heads > 0) PREFIXD_TRY(CheckRows(rows));
    auto kind = std::ranges::find(l.kinds, rows, &RunLayout::rows);
    if (kind == l.kinds.end()) kind = l.kinds.insert(kind, RunOf(l, rows));
    l.kind_of.push_back(static_cast<uint32_t>(kind - l.kinds.begin()));
    l.first_page.push_back(1 + static_cast<uint64_t>(row_pages));
    heads.push_back(rows.n_kv_heads);
    runs += rows.n_kv_heads;
    row_pages += static_cast<unsigned __int128>(rows.n_kv_heads) * kind->pages_per_run;
    if (row_pages > kMaxPages) return too_large;
  }
  if (!heads.empty()) l.heads = HeadIndex(heads);
  if (row_pages + runs * l.pages_per_order > kMaxPages || runs == 0 ||
      shape.manifest_bytes > kMaxPages) {
    return too_large;
  }
  l.token_page = 1 + static_cast<uint64_t>(row_pages);
  l.manifest_page = l.token_page + CeilDiv(shape.n_tokens, kTokensPerPage);
  l.order_page = l.manifest_page + CeilDiv(shape.manifest_bytes, kPageBytes);
  l.table_page = l.order_page + static_cast<uint64_t>(runs) * l.pages_per_order;
  l.footer_page = l.table_page + CeilDiv(l.table_page, l.checks_per_page());
  if (l.total_pages() > kMaxPages) return too_large;
  return l;
}

uint64_t SegmentLayout::KeyAddress(uint32_t layer, uint32_t head, uint32_t slot) const {
  const uint64_t run = run_page(layer, head);
  const RunLayout& own = of(layer);
  if (!reclustered()) return (run + own.row.page(slot)) * kPageBytes + own.row.offset(slot);
  const uint32_t chunk = slot / shape.chunk_tokens, i = slot % shape.chunk_tokens;
  return (run + chunk_keys(layer, chunk) + own.key.page(i)) * kPageBytes + own.key.offset(i);
}

uint64_t SegmentLayout::ValueAddress(uint32_t layer, uint32_t head, uint32_t slot) const {
  const RunLayout& own = of(layer);
  if (!reclustered()) return KeyAddress(layer, head, slot) + own.key_bytes();
  const uint32_t chunk = slot / shape.chunk_tokens, i = slot % shape.chunk_tokens;
  return (run_page(layer, head) + chunk_values(layer, chunk) + own.value.page(i)) * kPageBytes +
         own.value.offset(i);
}

}  // namespace prefixd::storage
