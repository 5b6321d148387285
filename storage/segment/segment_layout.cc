#include "storage/segment/segment_layout.h"

#include <limits>
#include <string>

namespace prefixd::storage {
namespace {

uint64_t CeilDiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

}  // namespace

ItemPages ItemPages::Of(uint32_t item_bytes) {
  return {item_bytes, std::max<uint32_t>(1, static_cast<uint32_t>(kPageBytes / item_bytes)),
          static_cast<uint32_t>(CeilDiv(item_bytes, kPageBytes))};
}

Result<SegmentLayout> SegmentLayout::Of(const SegmentShape& shape) {
  // The bound keeps every sum below from overflowing.
  constexpr uint32_t kMaxItemBytes = 1u << 24;
  if (shape.n_layers == 0 || shape.n_kv_heads == 0 || shape.key_bytes == 0 ||
      shape.value_bytes == 0 || shape.n_tokens == 0) {
    return InvalidArgument("a segment needs layers, KV heads, keys, values and tokens");
  }
  if (shape.key_bytes > kMaxItemBytes || shape.value_bytes > kMaxItemBytes) {
    return InvalidArgument("keys and values have at most 16 MiB");
  }
  if (shape.chunk_tokens > kMaxChunkTokens) {
    return InvalidArgument("a chunk has at most " + std::to_string(kMaxChunkTokens) + " tokens");
  }
  constexpr uint64_t kMaxPages = std::numeric_limits<uint32_t>::max();
  const Error too_large = InvalidArgument("a segment of " + std::to_string(shape.n_tokens) +
                                          " tokens of this geometry exceeds 2^32 pages");
  SegmentLayout l;
  l.shape = shape;
  l.row = ItemPages::Of(shape.key_bytes + shape.value_bytes);
  l.key = ItemPages::Of(shape.key_bytes);
  l.value = ItemPages::Of(shape.value_bytes);
  const auto runs = static_cast<unsigned __int128>(shape.n_layers) * shape.n_kv_heads;
  if (l.reclustered()) {
    l.pages_per_chunk = l.key.pages(shape.chunk_tokens) + l.value.pages(shape.chunk_tokens);
    const uint32_t last = l.chunk_size(l.chunks() - 1);
    l.pages_per_run =
        (l.chunks() - 1) * l.pages_per_chunk + l.key.pages(last) + l.value.pages(last);
    l.pages_per_order = CeilDiv(shape.n_tokens, kSlotsPerPage);
  } else {
    l.pages_per_run = l.row.pages(shape.n_tokens);
  }
  if (runs * (l.pages_per_run + l.pages_per_order) > kMaxPages ||
      shape.manifest_bytes > kMaxPages) {
    return too_large;
  }
  l.token_page = 1 + static_cast<uint64_t>(runs) * l.pages_per_run;
  l.manifest_page = l.token_page + CeilDiv(shape.n_tokens, kTokensPerPage);
  l.order_page = l.manifest_page + CeilDiv(shape.manifest_bytes, kPageBytes);
  l.table_page = l.order_page + static_cast<uint64_t>(runs) * l.pages_per_order;
  l.footer_page = l.table_page + CeilDiv(l.table_page, kChecksumsPerPage);
  if (l.total_pages() > kMaxPages) return too_large;
  return l;
}

uint64_t SegmentLayout::KeyAddress(uint32_t layer, uint32_t head, uint32_t slot) const {
  const uint64_t run = run_page(layer, head);
  if (!reclustered()) return (run + row.page(slot)) * kPageBytes + row.offset(slot);
  const uint32_t chunk = slot / shape.chunk_tokens, i = slot % shape.chunk_tokens;
  return (run + chunk_keys(chunk) + key.page(i)) * kPageBytes + key.offset(i);
}

uint64_t SegmentLayout::ValueAddress(uint32_t layer, uint32_t head, uint32_t slot) const {
  if (!reclustered()) return KeyAddress(layer, head, slot) + shape.key_bytes;
  const uint32_t chunk = slot / shape.chunk_tokens, i = slot % shape.chunk_tokens;
  return (run_page(layer, head) + chunk_values(chunk) + value.page(i)) * kPageBytes +
         value.offset(i);
}

}  // namespace prefixd::storage
