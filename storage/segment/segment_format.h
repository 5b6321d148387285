// Defines the bytes of a segment file, shared by writer and reader; docs/format.md explains them
// with a worked example. All integers are little-endian; unused bytes are zero.
//
//   header page | rows | token ids | manifest | orders | checksum table | footer
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/partition.h"
#include "prefixd/result.h"
#include "prefixd/stored_part.h"
#include "storage/crypt/cipher.h"
#include "storage/segment/identity.h"
#include "storage/segment/prefix_info.h"
#include "storage/segment/segment_layout.h"

namespace prefixd::storage {

// Version 1 (arrival layout only, the file named like its segment) is still read.
inline constexpr uint32_t kSegmentVersion = 2;
inline constexpr uint32_t kChecksumXxh3 = 1;
// The bit is set with every encoding except kAsGiven: a prefixd that cannot decode the rows refuses
// the file.
inline constexpr uint64_t kIncompatEncodedRows = 1u << 0;
// The bit is set with every lineage: a prefixd that would serve derived rows to everybody refuses
// the file.
inline constexpr uint64_t kIncompatDerivedRows = 1u << 1;
// The bit is set where layers differ: a prefixd that would look for rows elsewhere refuses the
// file.
inline constexpr uint64_t kIncompatLayers = 1u << 2;
// The bit is set where pages are encrypted: a prefixd that would take them for damaged refuses the
// file.
inline constexpr uint64_t kIncompatEncrypted = 1u << 3;
// The bit is set where some tokens have no rows: a prefixd that would look for them refuses the
// file.
inline constexpr uint64_t kIncompatCompressed = 1u << 4;
using Uuid = std::array<uint8_t, 16>;
using PageBytes = std::span<std::byte, kPageBytes>;
using ConstPageBytes = std::span<const std::byte, kPageBytes>;

// Returns the checksum of one page in its place: a page of another file or another place fails too.
uint64_t PageChecksum(const Uuid& file, uint64_t page, ConstPageBytes bytes);
// Returns the checksum of the whole table of `pages` checksums or tags.
uint64_t TableChecksum(const Uuid& file, uint64_t pages, std::span<const uint64_t> table);

// Header and footer of an encrypted file stay in clear, and bear a MAC. kCorrupt where it is not
// that of the page in this place. cipher: null where the file is not encrypted.
Status CheckMac(const FileCipher* cipher, uint64_t page, ConstPageBytes bytes);

// The KV heads and dimensions of one layer.
struct StoredLayer {
  uint32_t n_kv_heads = 0, key_dim = 0, value_dim = 0;  // all 0: the layer has no rows
  bool operator==(const StoredLayer&) const = default;
};

// The SegmentHeader is page 0.
struct SegmentHeader {
  // Readers ignore unknown compat bits, only read with unknown ro_compat bits, and refuse the file
  // for unknown incompat bits.
  uint64_t compat = 0, ro_compat = 0, incompat = 0;
  Uuid store{};
  Uuid segment{};  // keeps its name for life
  Uuid file{};     // names these very bytes: a rewrite makes another file
  Uuid parent{};   // all zero: the segment starts at token 0
  Fingerprint model;
  TokenRange tokens;  // positions in the prefix
  uint32_t n_layers = 0, n_kv_heads = 0, key_dim = 0, value_dim = 0;
  DType dtype = DType::kBf16;
  RowEncoding encoding = RowEncoding::kAsGiven;
  uint32_t chunk_tokens = 0;  // in the reclustered layout; 0: arrival
  uint32_t kept_rows = 0;     // of each run of a compressed segment; 0: all tokens have rows
  uint64_t manifest_bytes = 0;
  int64_t created_unix_ms = 0;
  Lineage lineage{};  // of derived rows; all zero: exact
  // [n_layers] where one differs from the numbers above; empty: none does.
  std::vector<StoredLayer> layers;
  CipherKind cipher = CipherKind::kNone;  // of the pages, with the master key of that id
  KeyId key;

  // The rows of a layer as given.
  RowShape row(uint32_t layer) const {
    if (layers.empty()) return {key_dim, value_dim, dtype};
    return {layers[layer].key_dim, layers[layer].value_dim, dtype};
  }
  bool encrypted() const { return cipher != CipherKind::kNone; }
  // Takes over layers, heads and dimensions, and the feature bit that they need.
  void SetGeometry(const KvGeometry& geometry);
  // Sets cipher and key (or neither), and the feature bit.
  void SetCipher(CipherKind kind, const KeyId& id);
  // Makes it the header of a compressed file (0: of one with all rows, in arrival layout), and sets
  // the feature bit.
  void SetKept(uint32_t rows);
  // Returns the bytes that the file has with all rows, in arrival layout.
  Result<uint64_t> FullBytes() const;
  // Whether these are the header's.
  bool IsOf(const KvGeometry& geometry) const;
  SegmentShape shape() const;
  Result<SegmentLayout> Layout() const;
  // mac: of an encrypted file.
  void Encode(PageBytes out, const FileCipher* mac = nullptr) const;
  // Checks no MAC, which takes a key. Errors: kCorrupt for bytes that are no segment header, or
  // damaged; kFailedPrecondition for a header that a newer prefixd wrote.
  static Result<SegmentHeader> Decode(ConstPageBytes page);
  bool operator==(const SegmentHeader&) const = default;
};

// The SegmentFooter is the last page; written last, it seals the segment.
struct SegmentFooter {
  Uuid file{};
  uint64_t sequence = 0;  // ascending over the store's commits, with gaps
  uint64_t total_pages = 0;
  uint64_t table_checksum = 0;
  uint64_t manifest_bytes = 0;
  int64_t sealed_unix_ms = 0;
  EncodingError error;  // zero where rows are as given

  void Encode(PageBytes out, const FileCipher* mac = nullptr) const;
  static Result<SegmentFooter> Decode(ConstPageBytes page);
  bool operator==(const SegmentFooter&) const = default;
};

}  // namespace prefixd::storage
