// The bytes of a segment file, shared by writer and reader; docs/format.md explains them with a
// worked example. All integers little-endian; unused bytes are zero.
//
//   header page | rows [layer][kv_head][token] | token ids | manifest | checksum table | footer
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "attention/kv_shape.h"
#include "attention/partition.h"
#include "attention/result.h"
#include "storage/identity.h"
#include "storage/prefix_store.h"

namespace prefixd::storage {

inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint32_t kSegmentVersion = 1;
inline constexpr uint32_t kChecksumXxh3 = 1;
inline constexpr uint64_t kChecksumsPerPage = kPageBytes / sizeof(uint64_t);
inline constexpr uint64_t kTokensPerPage = kPageBytes / sizeof(uint32_t);
using Uuid = std::array<uint8_t, 16>;
using PageBytes = std::span<std::byte, kPageBytes>;
using ConstPageBytes = std::span<const std::byte, kPageBytes>;

// Checksum of one page where it belongs: a page of another segment or another place fails too.
uint64_t PageChecksum(const Uuid& segment, uint64_t page, ConstPageBytes bytes);
// Checksum of a whole page checksum table.
uint64_t TableChecksum(const Uuid& segment, std::span<const uint64_t> table);

// Where everything lies, in closed form. Page numbers count from the file's start.
struct SegmentLayout {
  uint32_t n_layers = 0, n_kv_heads = 0, n_tokens = 0;
  uint32_t row_bytes = 0;
  uint32_t rows_per_page = 0;  // floor(page / row), at least 1
  uint32_t pages_per_row = 0;  // 1, or ceil(row / page) for rows larger than a page
  uint64_t pages_per_run = 0;  // of one (layer, KV head)
  uint64_t token_page = 0, manifest_page = 0, table_page = 0, footer_page = 0;

  // kInvalidArgument when the file would exceed 2^32 - 1 pages.
  static Result<SegmentLayout> Of(uint32_t n_layers, uint32_t n_kv_heads, uint32_t row_bytes,
                                  uint32_t n_tokens, uint64_t manifest_bytes);

  uint64_t total_pages() const { return footer_page + 1; }
  uint64_t file_bytes() const { return total_pages() * kPageBytes; }
  uint64_t run_page(uint32_t layer, uint32_t head) const {
    return 1 + (uint64_t{layer} * n_kv_heads + head) * pages_per_run;
  }
  // First page of row `i` of a run, relative to the run, and the row's offset in it.
  uint64_t row_page(uint32_t i) const {
    return pages_per_row > 1 ? uint64_t{i} * pages_per_row : i / rows_per_page;
  }
  uint32_t row_offset(uint32_t i) const {
    return pages_per_row > 1 ? 0 : i % rows_per_page * row_bytes;
  }
};

// Page 0.
struct SegmentHeader {
  // Unknown compat bits are ignored, ro_compat bits allow reading only, incompat bits refuse.
  uint64_t compat = 0, ro_compat = 0, incompat = 0;
  Uuid store{}, segment{}, parent{};  // parent all zero: the segment starts at token 0
  Fingerprint model;
  TokenRange tokens;  // positions in the prefix
  uint32_t n_layers = 0, n_kv_heads = 0, key_dim = 0, value_dim = 0;
  DType dtype = DType::kBf16;
  uint64_t manifest_bytes = 0;
  int64_t created_unix_ms = 0;

  RowShape row() const { return {key_dim, value_dim, dtype}; }
  Result<SegmentLayout> Layout() const;
  void Encode(PageBytes out) const;
  // kCorrupt: not a segment header, or damaged. kFailedPrecondition: written by a newer prefixd.
  static Result<SegmentHeader> Decode(ConstPageBytes page);
  bool operator==(const SegmentHeader&) const = default;
};

// The last page; written last, it seals the segment.
struct SegmentFooter {
  Uuid segment{};
  uint64_t sequence = 0;  // of commits in the store, ascending, with gaps
  uint64_t total_pages = 0;
  uint64_t table_checksum = 0;
  uint64_t manifest_bytes = 0;
  int64_t sealed_unix_ms = 0;

  void Encode(PageBytes out) const;
  static Result<SegmentFooter> Decode(ConstPageBytes page);
  bool operator==(const SegmentFooter&) const = default;
};

}  // namespace prefixd::storage
