#include "storage/segment/segment_format.h"

#include <xxhash.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "storage/segment/row_encoding.h"

namespace prefixd::storage {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr char kHeaderMagic[8] = {'P', 'F', 'X', 'S', 'E', 'G', '\r', '\n'};
constexpr char kFooterMagic[8] = {'P', 'F', 'X', 'F', 'O', 'O', 'T', '\n'};
constexpr uint64_t kKnownRoCompat = 0, kKnownIncompat = kIncompatEncodedRows | kIncompatDerivedRows;

// These are the images on disk. Every page of both kinds ends in a checksum over its first 4088
// bytes.
struct HeaderImage {
  char magic[8];
  uint32_t version, page_bytes;
  uint64_t compat, ro_compat, incompat;
  uint8_t store[16], segment[16], parent[16], model[32];
  uint32_t token_begin, token_end;
  uint32_t n_layers, n_kv_heads, key_dim, value_dim, dtype, checksum_id;
  uint32_t row_bytes, rows_per_page, pages_per_row, reserved;
  uint64_t pages_per_run, token_page, manifest_page, table_page, footer_page;
  uint64_t manifest_bytes;
  int64_t created_unix_ms;
  // Present since version 2.
  uint8_t file[16];
  uint32_t encoding, chunk_tokens, key_bytes, value_bytes;
  uint64_t pages_per_chunk, pages_per_order, order_page;
  // Zero where rows are exact, and therefore in files of older writers.
  uint8_t lineage[16];
};
static_assert(sizeof(HeaderImage) == 296, "the format changed: raise kSegmentVersion");

struct FooterImage {
  char magic[8];
  uint32_t version, page_bytes;
  uint8_t file[16];
  uint64_t sequence, total_pages, table_checksum, manifest_bytes;
  int64_t sealed_unix_ms;
  // Zero where rows are as given, and therefore in files of older writers.
  float key_error_max, key_error_rms, value_error_max, value_error_rms;
};
static_assert(sizeof(FooterImage) == 88, "the format changed: raise kSegmentVersion");

constexpr size_t kSelfChecksumAt = kPageBytes - sizeof(uint64_t);

template <typename Image>
void StoreImage(const Image& image, PageBytes out) {
  std::fill(out.begin(), out.end(), std::byte{0});
  std::memcpy(out.data(), &image, sizeof(image));
  const uint64_t sum = XXH3_64bits(out.data(), kSelfChecksumAt);
  std::memcpy(out.data() + kSelfChecksumAt, &sum, sizeof(sum));
}

template <typename Image>
Result<Image> LoadImage(ConstPageBytes page, const char (&magic)[8], const char* what) {
  Image image;
  std::memcpy(&image, page.data(), sizeof(image));
  if (std::memcmp(image.magic, magic, sizeof(magic)) != 0) {
    return Error{Code::kCorrupt, std::string("no segment ") + what + " (wrong magic)"};
  }
  uint64_t stored = 0;
  std::memcpy(&stored, page.data() + kSelfChecksumAt, sizeof(stored));
  if (stored != XXH3_64bits(page.data(), kSelfChecksumAt)) {
    return Error{Code::kCorrupt, std::string("the segment ") + what + " is damaged (checksum)"};
  }
  if (image.version < 1 || image.version > kSegmentVersion) {
    return Error{Code::kFailedPrecondition,
                 std::string("the segment ") + what + " has format version " +
                     std::to_string(image.version) + "; this prefixd reads versions up to " +
                     std::to_string(kSegmentVersion)};
  }
  if (image.page_bytes != kPageBytes) {
    return Error{Code::kCorrupt, std::string("the segment ") + what + " has pages of " +
                                     std::to_string(image.page_bytes) + " bytes"};
  }
  return image;
}

template <size_t N>
void CopyTo(const std::array<uint8_t, N>& from, uint8_t (&to)[N]) {
  std::memcpy(to, from.data(), N);
}
template <size_t N>
void CopyFrom(const uint8_t (&from)[N], std::array<uint8_t, N>& to) {
  std::memcpy(to.data(), from, N);
}

uint64_t PlaceSeed(const Uuid& file, uint64_t page) {
  uint8_t place[sizeof(Uuid) + sizeof(page)];
  std::memcpy(place, file.data(), file.size());
  std::memcpy(place + file.size(), &page, sizeof(page));
  return XXH3_64bits(place, sizeof(place));
}

}  // namespace

uint64_t PageChecksum(const Uuid& file, uint64_t page, ConstPageBytes bytes) {
  return XXH3_64bits_withSeed(bytes.data(), bytes.size(), PlaceSeed(file, page));
}

uint64_t TableChecksum(const Uuid& file, std::span<const uint64_t> table) {
  return XXH3_64bits_withSeed(table.data(), table.size_bytes(), PlaceSeed(file, table.size()));
}

SegmentShape SegmentHeader::shape() const {
  const auto [key_bytes, value_bytes] = StoredRowBytes(row(), encoding);
  return {n_layers,      n_kv_heads,   key_bytes,     value_bytes,
          tokens.size(), chunk_tokens, manifest_bytes};
}

Result<SegmentLayout> SegmentHeader::Layout() const {
  const SegmentShape s = shape();
  // Each key and each value lies in one page, so that a read decodes it where it was read.
  if (encoding != RowEncoding::kAsGiven && uint64_t{s.key_bytes} + s.value_bytes > kPageBytes) {
    return InvalidArgument("rows of " + std::to_string(s.key_bytes + s.value_bytes) +
                           " bytes as int8 are larger than a page; store them as given");
  }
  return SegmentLayout::Of(s);
}

void SegmentHeader::Encode(PageBytes out) const {
  const SegmentLayout l = Layout().value();
  HeaderImage h{};
  std::memcpy(h.magic, kHeaderMagic, sizeof(h.magic));
  h.version = kSegmentVersion;
  h.page_bytes = kPageBytes;
  h.compat = compat;
  h.ro_compat = ro_compat;
  h.incompat = incompat;
  CopyTo(store, h.store);
  CopyTo(segment, h.segment);
  CopyTo(parent, h.parent);
  CopyTo(model.bytes, h.model);
  h.token_begin = tokens.begin;
  h.token_end = tokens.end;
  h.n_layers = n_layers;
  h.n_kv_heads = n_kv_heads;
  h.key_dim = key_dim;
  h.value_dim = value_dim;
  h.dtype = static_cast<uint32_t>(dtype);
  h.checksum_id = kChecksumXxh3;
  h.row_bytes = l.row_bytes();
  h.rows_per_page = l.row.per_page;
  h.pages_per_row = l.row.pages_per_item;
  h.pages_per_run = l.pages_per_run;
  h.token_page = l.token_page;
  h.manifest_page = l.manifest_page;
  h.table_page = l.table_page;
  h.footer_page = l.footer_page;
  h.manifest_bytes = manifest_bytes;
  h.created_unix_ms = created_unix_ms;
  CopyTo(file, h.file);
  h.encoding = static_cast<uint32_t>(encoding);
  h.chunk_tokens = chunk_tokens;
  h.key_bytes = l.shape.key_bytes;
  h.value_bytes = l.shape.value_bytes;
  h.pages_per_chunk = l.pages_per_chunk;
  h.pages_per_order = l.pages_per_order;
  h.order_page = l.order_page;
  CopyTo(lineage, h.lineage);
  StoreImage(h, out);
}

Result<SegmentHeader> SegmentHeader::Decode(ConstPageBytes page) {
  PREFIXD_ASSIGN(const HeaderImage h, LoadImage<HeaderImage>(page, kHeaderMagic, "header"));
  if ((h.incompat & ~kKnownIncompat) != 0 || (h.ro_compat & ~kKnownRoCompat) != 0) {
    // Segments are immutable, yet this prefixd replaces and removes them: both kinds of bits
    // refuse.
    return Error{Code::kFailedPrecondition,
                 "the segment uses features of a newer prefixd; upgrade to read it"};
  }
  const Error malformed{Code::kCorrupt, "the segment header contradicts itself"};
  const bool encoded = h.version >= 2 && h.encoding != 0;
  if (encoded != ((h.incompat & kIncompatEncodedRows) != 0)) return malformed;
  Lineage lineage;
  CopyFrom(h.lineage, lineage);
  const bool derived = h.version >= 2 && lineage != Lineage{};
  if (derived != ((h.incompat & kIncompatDerivedRows) != 0)) return malformed;
  if (h.checksum_id != kChecksumXxh3 || h.dtype < 1 || h.dtype > 3 || !KnownEncoding(h.encoding) ||
      h.token_begin >= h.token_end || h.key_dim > 1u << 16 || h.value_dim > 1u << 16) {
    return malformed;
  }
  SegmentHeader out;
  out.compat = h.compat;
  out.ro_compat = h.ro_compat;
  out.incompat = h.incompat;
  CopyFrom(h.store, out.store);
  CopyFrom(h.segment, out.segment);
  CopyFrom(h.parent, out.parent);
  CopyFrom(h.model, out.model.bytes);
  out.tokens = {h.token_begin, h.token_end};
  out.n_layers = h.n_layers;
  out.n_kv_heads = h.n_kv_heads;
  out.key_dim = h.key_dim;
  out.value_dim = h.value_dim;
  out.dtype = static_cast<DType>(h.dtype);
  out.manifest_bytes = h.manifest_bytes;
  out.created_unix_ms = h.created_unix_ms;
  out.file = out.segment;
  if (h.version >= 2) {
    CopyFrom(h.file, out.file);
    out.encoding = static_cast<RowEncoding>(h.encoding);
    out.chunk_tokens = h.chunk_tokens;
    out.lineage = lineage;
  }
  const Result<SegmentLayout> l = out.Layout();
  if (!l.ok()) return malformed;
  const bool agrees = h.row_bytes == l->row_bytes() && h.rows_per_page == l->row.per_page &&
                      h.pages_per_row == l->row.pages_per_item &&
                      h.pages_per_run == l->pages_per_run && h.token_page == l->token_page &&
                      h.manifest_page == l->manifest_page && h.table_page == l->table_page &&
                      h.footer_page == l->footer_page;
  const bool agrees_since_2 =
      h.version < 2 ||
      (h.key_bytes == l->shape.key_bytes && h.value_bytes == l->shape.value_bytes &&
       h.pages_per_chunk == l->pages_per_chunk && h.pages_per_order == l->pages_per_order &&
       h.order_page == l->order_page);
  if (!agrees || !agrees_since_2) return malformed;
  return out;
}

void SegmentFooter::Encode(PageBytes out) const {
  FooterImage f{};
  std::memcpy(f.magic, kFooterMagic, sizeof(f.magic));
  f.version = kSegmentVersion;
  f.page_bytes = kPageBytes;
  CopyTo(file, f.file);
  f.sequence = sequence;
  f.total_pages = total_pages;
  f.table_checksum = table_checksum;
  f.manifest_bytes = manifest_bytes;
  f.sealed_unix_ms = sealed_unix_ms;
  f.key_error_max = error.key_max;
  f.key_error_rms = error.key_rms;
  f.value_error_max = error.value_max;
  f.value_error_rms = error.value_rms;
  StoreImage(f, out);
}

Result<SegmentFooter> SegmentFooter::Decode(ConstPageBytes page) {
  PREFIXD_ASSIGN(const FooterImage f, LoadImage<FooterImage>(page, kFooterMagic, "footer"));
  SegmentFooter out;
  CopyFrom(f.file, out.file);
  out.sequence = f.sequence;
  out.total_pages = f.total_pages;
  out.table_checksum = f.table_checksum;
  out.manifest_bytes = f.manifest_bytes;
  out.sealed_unix_ms = f.sealed_unix_ms;
  out.error = {f.key_error_max, f.key_error_rms, f.value_error_max, f.value_error_rms};
  if (!Plausible(out.error)) {
    return Error{Code::kCorrupt, "the segment footer names an impossible encoding error"};
  }
  return out;
}

}  // namespace prefixd::storage
