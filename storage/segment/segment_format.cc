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
constexpr uint64_t kKnownRoCompat = 0, kKnownIncompat = kIncompatEncodedRows |
                                                        kIncompatDerivedRows | kIncompatLayers |
                                                        kIncompatEncrypted | kIncompatCompressed;
constexpr uint32_t kMaxLayers = 1024;  // with a table of kinds

// The layers where they differ: their kinds, and which each is of. Kind 0 is the header's own; the
// others come in the order of their first layers.
struct LayersImage {
  uint32_t n_kinds, zero;
  struct {
    uint32_t n_kv_heads, key_dim, value_dim;
  } kinds[kMaxLayerKinds];
  uint8_t kind_of[kMaxLayers];
};
static_assert(sizeof(LayersImage) == 1800, "the format changed: raise kSegmentVersion");

// These are the images on disk. Every page of both kinds ends in a checksum over its first 4088
// bytes.
struct HeaderImage {
  char magic[8];
  uint32_t version, page_bytes;
  uint64_t compat, ro_compat, incompat;
  uint8_t store[16], segment[16], parent[16], model[32];
  uint32_t token_begin, token_end;
  uint32_t n_layers, n_kv_heads, key_dim, value_dim, dtype, checksum_id;
  uint32_t row_bytes, rows_per_page, pages_per_row;
  uint32_t cipher;  // zero where pages are not encrypted, and therefore in files of older writers
  uint64_t pages_per_run, token_page, manifest_page, table_page, footer_page;
  uint64_t manifest_bytes;
  int64_t created_unix_ms;
  // Present since version 2.
  uint8_t file[16];
  uint32_t encoding, chunk_tokens, key_bytes, value_bytes;
  uint64_t pages_per_chunk, pages_per_order, order_page;
  // Zero where rows are exact, and therefore in files of older writers.
  uint8_t lineage[16];
  // Zero where layers are alike, and therefore in files of older writers.
  LayersImage layers;
  uint8_t key[16];  // of encrypted pages
  // Zero where all tokens have rows, and therefore in files of older writers.
  uint32_t kept_rows, kept_zero;
};
static_assert(sizeof(HeaderImage) == 2120, "the format changed: raise kSegmentVersion");

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
// Zero where the file is not encrypted.
constexpr size_t kMacAt = kSelfChecksumAt - sizeof(FileCipher::Mac);

template <typename Image>
void StoreImage(const Image& image, uint64_t page, const FileCipher* cipher, PageBytes out) {
  std::fill(out.begin(), out.end(), std::byte{0});
  std::memcpy(out.data(), &image, sizeof(image));
  if (cipher != nullptr) {
    const FileCipher::Mac mac = cipher->MacOf(page, out.first(kMacAt));
    std::memcpy(out.data() + kMacAt, mac.data(), mac.size());
  }
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

// Returns an image of zeros where layers are alike.
LayersImage ImageOf(const SegmentHeader& header) {
  LayersImage image{};
  std::vector<StoredLayer> kinds = {{header.n_kv_heads, header.key_dim, header.value_dim}};
  for (size_t l = 0; l < header.layers.size() && l < kMaxLayers; ++l) {
    auto kind = std::ranges::find(kinds, header.layers[l]);
    if (kind == kinds.end()) {
      if (kinds.size() > kMaxLayerKinds) break;  // KvGeometry::Validate refuses so many
      kind = kinds.insert(kind, header.layers[l]);
      image.kinds[image.n_kinds++] = {kind->n_kv_heads, kind->key_dim, kind->value_dim};
    }
    image.kind_of[l] = static_cast<uint8_t>(kind - kinds.begin());
  }
  return image;
}

// Takes the layers over; false where they could not be written so.
bool ReadLayers(const LayersImage& image, SegmentHeader& header) {
  if (image.n_kinds > kMaxLayerKinds || header.n_layers > kMaxLayers) return false;
  for (uint32_t l = 0; l < header.n_layers; ++l) {
    const uint32_t kind = image.kind_of[l];
    if (kind > image.n_kinds) return false;
    if (kind == 0) {
      header.layers.push_back({header.n_kv_heads, header.key_dim, header.value_dim});
      continue;
    }
    const auto& stored = image.kinds[kind - 1];
    const StoredLayer layer{stored.n_kv_heads, stored.key_dim, stored.value_dim};
    const bool rows = layer.n_kv_heads > 0 && layer.key_dim > 0 && layer.value_dim > 0;
    if (layer.key_dim > 1u << 16 || layer.value_dim > 1u << 16) return false;
    if (!rows && layer != StoredLayer{}) return false;
    header.layers.push_back(layer);
  }
  const LayersImage again = ImageOf(header);
  return std::memcmp(&again, &image, sizeof(image)) == 0;
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

uint64_t TableChecksum(const Uuid& file, uint64_t pages, std::span<const uint64_t> table) {
  return XXH3_64bits_withSeed(table.data(), table.size_bytes(), PlaceSeed(file, pages));
}

Status CheckMac(const FileCipher* cipher, uint64_t page, ConstPageBytes bytes) {
  if (cipher == nullptr ||
      cipher->IsMac(page, bytes.first(kMacAt), bytes.subspan(kMacAt, sizeof(FileCipher::Mac)))) {
    return {};
  }
  return Error{Code::kCorrupt, std::string("the segment ") + (page == 0 ? "header" : "footer") +
                                   " is not the one that was written (MAC)"};
}

void SegmentHeader::SetGeometry(const KvGeometry& geometry) {
  n_layers = geometry.n_layers;
  n_kv_heads = geometry.n_kv_heads;
  key_dim = geometry.key_dim;
  value_dim = geometry.value_dim;
  dtype = geometry.dtype;
  const StoredLayer own{n_kv_heads, key_dim, value_dim};
  layers.clear();
  for (uint32_t l = 0; l < n_layers; ++l) {
    const LayerShape layer = geometry.layer(l);
    layers.push_back({layer.n_kv_heads, layer.key_dim, layer.value_dim});
  }
  if (std::ranges::all_of(layers, [&](const StoredLayer& l) { return l == own; })) layers.clear();
  incompat = layers.empty() ? incompat & ~kIncompatLayers : incompat | kIncompatLayers;
}

void SegmentHeader::SetCipher(CipherKind kind, const KeyId& id) {
  cipher = kind;
  key = id;
  incompat = encrypted() ? incompat | kIncompatEncrypted : incompat & ~kIncompatEncrypted;
}

void SegmentHeader::SetKept(uint32_t rows) {
  kept_rows = rows;
  chunk_tokens = 0;
  incompat = rows > 0 ? incompat | kIncompatCompressed : incompat & ~kIncompatCompressed;
}

Result<uint64_t> SegmentHeader::FullBytes() const {
  SegmentHeader full = *this;
  full.SetKept(0);
  PREFIXD_ASSIGN(const SegmentLayout layout, full.Layout());
  return layout.file_bytes();
}

bool SegmentHeader::IsOf(const KvGeometry& geometry) const {
  SegmentHeader same;
  same.SetGeometry(geometry);
  return n_layers == same.n_layers && n_kv_heads == same.n_kv_heads && key_dim == same.key_dim &&
         value_dim == same.value_dim && dtype == same.dtype && layers == same.layers;
}

SegmentShape SegmentHeader::shape() const {
  const auto [key_bytes, value_bytes] = StoredRowBytes({key_dim, value_dim, dtype}, encoding);
  SegmentShape shape{n_layers,      n_kv_heads,   key_bytes,      value_bytes,
                     tokens.size(), chunk_tokens, manifest_bytes, {}};
  for (uint32_t l = 0; l < layers.size(); ++l) {
    if (layers[l].n_kv_heads == 0) {
      shape.layers.push_back({});
      continue;
    }
    const auto [own_key, value] = StoredRowBytes(row(l), encoding);
    shape.layers.push_back({layers[l].n_kv_heads, own_key, value});
  }
  if (encrypted()) shape.check_bytes = kTagBytes;
  shape.kept_rows = kept_rows;
  return shape;
}

Result<SegmentLayout> SegmentHeader::Layout() const {
  PREFIXD_ASSIGN(SegmentLayout layout, SegmentLayout::Of(shape()));
  // Each key and each value lies in one page, so that a read decodes it where it was read.
  for (uint32_t i = 0; i < layout.kinds.size(); ++i) {
    const uint32_t bytes = layout.kinds[i].row_bytes();
    if (encoding == RowEncoding::kAsGiven || bytes <= kPageBytes) continue;
    if (!layout.kind_of.empty() && std::ranges::count(layout.kind_of, i) == 0) continue;  // unused
    return InvalidArgument("rows of " + std::to_string(bytes) +
                           " bytes as int8 are larger than a page; store them as given");
  }
  return layout;
}

void SegmentHeader::Encode(PageBytes out, const FileCipher* mac) const {
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
  const RunLayout& own = l.kinds[0];
  h.row_bytes = own.row_bytes();
  h.rows_per_page = own.row.per_page;
  h.pages_per_row = own.row.pages_per_item;
  h.pages_per_run = own.pages_per_run;
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
  h.pages_per_chunk = own.pages_per_chunk;
  h.pages_per_order = l.pages_per_order;
  h.order_page = l.order_page;
  CopyTo(lineage, h.lineage);
  h.layers = ImageOf(*this);
  h.cipher = static_cast<uint32_t>(cipher);
  CopyTo(key.bytes, h.key);
  h.kept_rows = kept_rows;
  StoreImage(h, 0, mac, out);
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
  const bool encrypted = h.version >= 2 && h.cipher != 0;
  if (encrypted != ((h.incompat & kIncompatEncrypted) != 0)) return malformed;
  if (encrypted && !KnownCipher(h.cipher)) {
    return Error{Code::kFailedPrecondition,
                 "the segment is encrypted with a cipher of a newer prefixd; upgrade to read it"};
  }
  SegmentHeader out;
  if (encrypted) {
    out.cipher = static_cast<CipherKind>(h.cipher);
    CopyFrom(h.key, out.key.bytes);
  }
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
  const bool compressed = h.version >= 2 && h.kept_rows != 0;
  if (compressed != ((h.incompat & kIncompatCompressed) != 0)) return malformed;
  if (compressed) out.kept_rows = h.kept_rows;
  const bool differ = h.version >= 2 && h.layers.n_kinds != 0;
  if (differ != ((h.incompat & kIncompatLayers) != 0)) return malformed;
  if (differ && !ReadLayers(h.layers, out)) return malformed;
  const Result<SegmentLayout> l = out.Layout();
  if (!l.ok()) return malformed;
  const RunLayout& own = l->kinds[0];
  const bool agrees = h.row_bytes == own.row_bytes() && h.rows_per_page == own.row.per_page &&
                      h.pages_per_row == own.row.pages_per_item &&
                      h.pages_per_run == own.pages_per_run && h.token_page == l->token_page &&
                      h.manifest_page == l->manifest_page && h.table_page == l->table_page &&
                      h.footer_page == l->footer_page;
  const bool agrees_since_2 =
      h.version < 2 ||
      (h.key_bytes == l->shape.key_bytes && h.value_bytes == l->shape.value_bytes &&
       h.pages_per_chunk == own.pages_per_chunk && h.pages_per_order == l->pages_per_order &&
       h.order_page == l->order_page);
  if (!agrees || !agrees_since_2) return malformed;
  return out;
}

void SegmentFooter::Encode(PageBytes out, const FileCipher* mac) const {
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
  StoreImage(f, total_pages - 1, mac, out);
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
