// Computes where everything lies in a segment file, in closed form; docs/format.md explains it with
// worked examples. Rows have two layouts:
//
//   arrival: [layer][kv_head][token], key and value of a token adjacent: the order in which a put
//            streams rows
//   reclustered: [layer][kv_head][chunk][keys in slot order | values in slot order]: inside a chunk
//   of
//            consecutive tokens rows lie by similarity of their keys (the order is stored), keys
//            and values in pages of their own, so that either can be read without the other
//
// A compressed segment is in the arrival layout, but of each run it has the rows of some tokens
// alone, as many for every run, and lists which: the tokens' own indices, ascending.
//
// Layers may differ in their KV heads and in the bytes of a row; runs follow one another all the
// same.
//
// "Own index": a token's position minus the segment's first. "Slot": where its row lies; equal to
// the own index in the arrival layout, a permutation inside each chunk in the reclustered one, the
// place in the list in a compressed segment.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "prefixd/head_index.h"
#include "prefixd/result.h"

namespace prefixd::storage {

inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint64_t kChecksumsPerPage = kPageBytes / sizeof(uint64_t);  // not encrypted
inline constexpr uint64_t kTokensPerPage = kPageBytes / sizeof(uint32_t);
inline constexpr uint64_t kSlotsPerPage = kPageBytes / sizeof(uint16_t);  // slots of a stored order
inline constexpr uint32_t kMaxChunkTokens = 1u << 16;

// ItemPages places items of one size in consecutive pages: none straddles a page, larger ones take
// whole pages.
struct ItemPages {
  uint32_t bytes = 0;
  uint32_t per_page = 0;        // at least 1
  uint32_t pages_per_item = 0;  // 1, or ceil(bytes / page) for items larger than a page

  static ItemPages Of(uint32_t item_bytes);
  uint64_t pages(uint64_t n) const {
    return pages_per_item > 1 ? n * pages_per_item : (n + per_page - 1) / per_page;
  }
  // Returns the page of item i, relative to the first page. The bytes of an item are contiguous
  // from there.
  uint64_t page(uint64_t i) const { return pages_per_item > 1 ? i * pages_per_item : i / per_page; }
  uint32_t offset(uint64_t i) const {
    return pages_per_item > 1 ? 0 : static_cast<uint32_t>(i % per_page) * bytes;
  }
};

// What one layer stores of each token.
struct LayerRows {
  uint32_t n_kv_heads = 0;                  // 0: the layer has no rows
  uint32_t key_bytes = 0, value_bytes = 0;  // of one KV head, as stored
  bool operator==(const LayerRows&) const = default;
};

// A SegmentShape determines the layout.
struct SegmentShape {
  uint32_t n_layers = 0, n_kv_heads = 0;
  uint32_t key_bytes = 0, value_bytes = 0;  // per token of one KV head, as stored
  uint32_t n_tokens = 0;
  uint32_t chunk_tokens = 0;  // in the reclustered layout; 0: arrival
  uint64_t manifest_bytes = 0;
  // [layers] where they differ; empty: each has the heads and bytes above.
  std::vector<LayerRows> layers = {};
  // Of what the table holds for each page: a checksum, or the tag of an encrypted page.
  uint32_t check_bytes = sizeof(uint64_t);
  uint32_t kept_rows = 0;  // of each run, fewer than n_tokens; 0: not compressed
  bool operator==(const SegmentShape&) const = default;
};

// How the runs of a layer lie; layers of one kind have the same.
struct RunLayout {
  LayerRows rows;
  ItemPages row;                 // arrival: key and value together
  ItemPages key, value;          // reclustered
  uint64_t pages_per_chunk = 0;  // pages of a full chunk; reclustered
  uint64_t pages_per_run = 0;    // pages of one (layer, KV head)

  uint32_t key_bytes() const { return rows.key_bytes; }
  uint32_t value_bytes() const { return rows.value_bytes; }
  uint32_t row_bytes() const { return rows.key_bytes + rows.value_bytes; }
};

struct SegmentLayout {
  SegmentShape shape;
  std::vector<RunLayout> kinds;  // the first is the model's own, whether or not a layer is of it
  HeadIndex heads;
  // Pages of one (layer, KV head): the order of a reclustered segment, the list of a compressed
  // one.
  uint64_t pages_per_order = 0;
  uint64_t token_page = 0, manifest_page = 0, order_page = 0, table_page = 0, footer_page = 0;

  // Returns kInvalidArgument when a dimension is missing or the file would exceed 2^32 - 1 pages.
  static Result<SegmentLayout> Of(const SegmentShape& shape);

  bool reclustered() const { return shape.chunk_tokens > 0; }
  bool compressed() const { return shape.kept_rows > 0; }
  // Rows of one run.
  uint32_t rows() const { return compressed() ? shape.kept_rows : shape.n_tokens; }
  uint64_t checks_per_page() const { return kPageBytes / shape.check_bytes; }
  // Returns the size of the table as it is kept in memory.
  uint64_t table_words() const { return table_page * (shape.check_bytes / sizeof(uint64_t)); }
  const RunLayout& of(uint32_t layer) const { return kinds[kind_of.empty() ? 0 : kind_of[layer]]; }
  uint32_t runs() const { return static_cast<uint32_t>(heads.count()); }
  uint64_t total_pages() const { return footer_page + 1; }
  uint64_t file_bytes() const { return total_pages() * kPageBytes; }

  uint32_t run(uint32_t layer, uint32_t head) const {
    return static_cast<uint32_t>(heads.of(layer, head));
  }
  uint64_t run_page(uint32_t layer, uint32_t head) const {
    const uint64_t pages = of(layer).pages_per_run;
    return first_page.empty() ? 1 + run(layer, head) * pages : first_page[layer] + head * pages;
  }
  // Returns the first page of the stored order of one run: slots in the chunk, uint16 each, by own
  // index. Of a compressed segment: own indices, uint32 each, by slot.
  uint64_t order_page_of(uint32_t layer, uint32_t head) const {
    return order_page + uint64_t{run(layer, head)} * pages_per_order;
  }

  // Tokens of a chunk of the reclustered layout; the arrival layout has one chunk of all tokens.
  uint32_t chunk_tokens() const { return reclustered() ? shape.chunk_tokens : shape.n_tokens; }
  uint32_t chunks() const { return (shape.n_tokens + chunk_tokens() - 1) / chunk_tokens(); }
  uint32_t chunk_begin(uint32_t chunk) const { return chunk * chunk_tokens(); }
  uint32_t chunk_size(uint32_t chunk) const {
    return std::min(chunk_tokens(), shape.n_tokens - chunk_begin(chunk));
  }
  // Return the first page of a chunk's keys and of its values, relative to the run; reclustered.
  uint64_t chunk_keys(uint32_t layer, uint32_t chunk) const {
    return chunk * of(layer).pages_per_chunk;
  }
  uint64_t chunk_values(uint32_t layer, uint32_t chunk) const {
    return chunk_keys(layer, chunk) + of(layer).key.pages(chunk_size(chunk));
  }

  // Return the byte addresses in the file of the key and the value in a slot.
  uint64_t KeyAddress(uint32_t layer, uint32_t head, uint32_t slot) const;
  uint64_t ValueAddress(uint32_t layer, uint32_t head, uint32_t slot) const;

  // [layers] where they differ, else empty: each layer's index in `kinds`, and its first page.
  std::vector<uint32_t> kind_of;
  std::vector<uint64_t> first_page;
};

}  // namespace prefixd::storage
