#include "storage/catalog/segment_inspect.h"

#include <fcntl.h>

#include <algorithm>

#include "storage/catalog/store_dir.h"
#include "storage/io/errors.h"

namespace prefixd::storage {
namespace {

Error Unsealed(const std::filesystem::path& path, const std::string& why) {
  return {Code::kCorrupt, path.string() + " is no sealed segment: " + why};
}

struct OpenedHeader {
  UniqueFd fd;
  SegmentHeader header;
  SegmentLayout layout;
  uint64_t file_bytes = 0;
};

Result<OpenedHeader> OpenHeader(IoEngine& engine, const std::filesystem::path& path, bool direct,
                                PageBytes page) {
  OpenedHeader out;
  PREFIXD_ASSIGN(out.fd, OpenMaybeDirect(path, O_RDONLY, direct));
  PREFIXD_ASSIGN(out.file_bytes, FileBytes(out.fd.get(), path));
  if (out.file_bytes < 2 * kPageBytes) return Unsealed(path, "it is too short");
  PREFIXD_TRY(ReadFully(engine, out.fd.get(), 0, page, IoPriority::kScrub, path.string()));
  PREFIXD_ASSIGN(out.header, SegmentHeader::Decode(page));
  PREFIXD_ASSIGN(out.layout, out.header.Layout());
  return out;
}

Result<SegmentEnds> ReadEndsOnce(IoEngine& engine, const std::filesystem::path& path, bool direct,
                                 const KeyRing* keys) {
  AlignedBuffer page(kPageBytes);
  const PageBytes view(page.data(), kPageBytes);
  PREFIXD_ASSIGN(const OpenedHeader opened, OpenHeader(engine, path, direct, view));
  if (opened.layout.file_bytes() != opened.file_bytes) {
    return Unsealed(path, "its length is not what its header says");
  }
  PREFIXD_ASSIGN(const PageSeal seal, PageSeal::Of(keys, opened.header, view));
  PREFIXD_TRY(ReadFully(engine, opened.fd.get(), opened.layout.footer_page * kPageBytes, view,
                        IoPriority::kScrub, path.string()));
  PREFIXD_ASSIGN(const SegmentFooter footer, SegmentFooter::Decode(view));
  PREFIXD_TRY(CheckMac(seal.cipher(), opened.layout.footer_page, view));
  if (footer.file != opened.header.file || footer.total_pages != opened.layout.total_pages() ||
      footer.manifest_bytes != opened.header.manifest_bytes) {
    return Unsealed(path, "header and footer do not agree");
  }
  return SegmentEnds{opened.header, footer, opened.file_bytes};
}

}  // namespace

Result<SegmentEnds> ReadSegmentEnds(IoEngine& engine, const std::filesystem::path& path,
                                    bool direct, const KeyRing* keys) {
  auto ends = ReadEndsOnce(engine, path, direct, keys);
  if (ends.ok() || ends.error().code != Code::kCorrupt) return ends;
  return ReadEndsOnce(engine, path, direct, keys);  // a transient fault must not condemn the file
}

bool IsUnfinished(IoEngine& engine, const std::filesystem::path& path, bool direct) {
  AlignedBuffer page(kPageBytes);
  const PageBytes view(page.data(), kPageBytes);
  const auto opened = OpenHeader(engine, path, direct, view);
  if (!opened.ok()) return false;
  const uint64_t footer = opened->layout.footer_page * kPageBytes;
  if (opened->file_bytes < footer + kPageBytes) return true;
  if (!ReadFully(engine, opened->fd.get(), footer, view, IoPriority::kScrub, path.string()).ok()) {
    return false;
  }
  return std::all_of(view.begin(), view.end(), [](std::byte b) { return b == std::byte{0}; });
}

Result<InspectedSegment> InspectSegment(IoEngine& engine, const std::filesystem::path& path,
                                        bool direct, const KeyRing* keys) {
  PREFIXD_ASSIGN(const SegmentEnds ends, ReadSegmentEnds(engine, path, direct, keys));
  const SegmentHeader& header = ends.header;
  SegmentRecord record;
  record.id.bytes = header.segment;
  record.file = header.file;
  record.sequence = ends.footer.sequence;
  record.parent.bytes = header.parent;
  record.tokens = header.tokens;
  record.file_bytes = ends.file_bytes;
  record.created_unix_ms = header.created_unix_ms;
  record.reclustered = header.chunk_tokens > 0;
  record.encoding = header.encoding;
  record.encoding_error = ends.footer.error;
  record.lineage = header.lineage;
  record.kept_rows = header.kept_rows;
  if (record.compressed()) {
    PREFIXD_ASSIGN(record.full_bytes, header.FullBytes());
  }
  if ((record.tokens.begin == 0) != record.is_root()) {
    return Unsealed(path, "it begins at token " + std::to_string(record.tokens.begin) +
                              (record.is_root() ? " without" : " with") + " a parent");
  }
  InspectedSegment out;
  {
    PREFIXD_ASSIGN(const auto file, SegmentFile::Open(engine, path, record, direct, {}, {}, keys));
    PREFIXD_ASSIGN(const std::string manifest, file->Manifest(engine));
    PREFIXD_ASSIGN(out.manifest, DecodeManifest(manifest));
    record.first_token = file->tokens().front();
  }
  if (out.manifest.model.fingerprint != header.model || !header.IsOf(out.manifest.model.geometry)) {
    return Unsealed(path, "header and manifest name different models");
  }
  record.model = out.manifest.model.name;
  record.tenant = out.manifest.tenant;
  record.label = out.manifest.label;
  record.listed = out.manifest.listed;
  record.live = out.manifest.live;
  PREFIXD_ASSIGN(out.file, SegmentFile::Open(engine, path, record, direct, {}, {}, keys));
  return out;
}

Result<std::vector<uint32_t>> ChainTokens(IoEngine& engine, const std::filesystem::path& dir,
                                          std::span<const SegmentRecord> chain, bool direct,
                                          const KeyRing* keys) {
  std::vector<uint32_t> tokens;
  for (size_t i = 0; i < chain.size(); ++i) {
    const uint32_t end = i + 1 < chain.size() ? chain[i + 1].tokens.begin : chain[i].tokens.end;
    if (i + 1 < chain.size()) PREFIXD_TRY(CheckContinues(chain[i], chain[i + 1]));
    PREFIXD_ASSIGN(const auto file, SegmentFile::OpenIds(engine, SegmentPath(dir, chain[i].file),
                                                         chain[i], direct, {}, {}, keys));
    const auto ids = file->tokens().first(end - chain[i].tokens.begin);
    tokens.insert(tokens.end(), ids.begin(), ids.end());
  }
  return tokens;
}

std::vector<BlockHash> OwnHashes(std::span<const BlockHash> hashes, uint32_t begin,
                                 uint32_t block_tokens) {
  const auto own = hashes.subspan(std::min<size_t>(hashes.size(), begin / block_tokens));
  return {own.begin(), own.end()};
}

Status CheckContinues(const SegmentRecord& parent, const SegmentRecord& child) {
  if (parent.model == child.model && parent.tenant == child.tenant &&
      child.tokens.begin > parent.tokens.begin && child.tokens.begin <= parent.tokens.end &&
      (parent.lineage == Lineage{} || parent.lineage == child.lineage) && !parent.compressed()) {
    return {};
  }
  return Error{Code::kCorrupt, "segment " + child.id.ToString() +
                                   " does not fit the segment it continues, " +
                                   parent.id.ToString()};
}

}  // namespace prefixd::storage
