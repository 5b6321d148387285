#include "storage/segment_file.h"

#include <fcntl.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "storage/errors.h"

namespace prefixd::storage {
namespace {

Error Damaged(const std::filesystem::path& path, const std::string& how) {
  return {Code::kCorrupt, "segment " + path.string() + ": " + how};
}

// Runs `load` again once if it fails: a transient fault must not condemn a segment.
template <typename Load>
Status Twice(Load load) {
  Status first = load();
  return first.ok() ? first : load();
}

}  // namespace

Result<UniqueFd> OpenMaybeDirect(const std::filesystem::path& path, int flags, bool direct) {
  if (direct) {
    auto fd = OpenFile(path, flags | O_DIRECT);
    if (fd.ok() || errno != EINVAL) return fd;
  }
  return OpenFile(path, flags);
}

Status SegmentFile::OpenEnds(IoEngine& engine, const std::filesystem::path& path,
                             const SegmentRecord& record, bool direct) {
  record_ = record;
  auto fd = OpenMaybeDirect(path, O_RDONLY, direct);
  if (!fd.ok()) {
    if (fd.error().code == Code::kNotFound) return Damaged(path, "the file is missing");
    return fd.error();
  }
  fd_ = std::move(*fd);
  PREFIXD_ASSIGN(const uint64_t bytes, FileBytes(fd_.get(), path));
  if (bytes != record.file_bytes || bytes % kPageBytes != 0 || bytes < 2 * kPageBytes) {
    return Damaged(path, "the file has " + std::to_string(bytes) + " bytes instead of " +
                             std::to_string(record.file_bytes));
  }
  return Twice([&]() -> Status {
    AlignedBuffer page(kPageBytes);
    const PageBytes view(page.data(), kPageBytes);
    PREFIXD_TRY(ReadFully(engine, fd_.get(), 0, view, IoPriority::kStepRead, path.string()));
    PREFIXD_ASSIGN(header_, SegmentHeader::Decode(view));
    PREFIXD_ASSIGN(layout_, header_.Layout());
    if (header_.segment != record.id.bytes || header_.parent != record.parent.bytes ||
        header_.tokens != record.tokens || layout_.file_bytes() != bytes) {
      return Damaged(path, "the header does not agree with the catalog");
    }
    PREFIXD_TRY(ReadFully(engine, fd_.get(), layout_.footer_page * kPageBytes, view,
                          IoPriority::kStepRead, path.string()));
    PREFIXD_ASSIGN(footer_, SegmentFooter::Decode(view));
    if (footer_.segment != header_.segment || footer_.sequence != record.sequence ||
        footer_.total_pages != layout_.total_pages() ||
        footer_.manifest_bytes != header_.manifest_bytes) {
      return Damaged(path, "the footer does not agree with header and catalog");
    }
    return {};
  });
}

Status SegmentFile::LoadTable(IoEngine& engine, const std::filesystem::path& path) {
  const uint64_t pages = layout_.footer_page - layout_.table_page;
  AlignedBuffer buffer(pages * kPageBytes);
  PREFIXD_TRY(ReadFully(engine, fd_.get(), layout_.table_page * kPageBytes, buffer.span(),
                        IoPriority::kStepRead, path.string()));
  table_.resize(layout_.table_page);
  std::memcpy(table_.data(), buffer.data(), table_.size() * sizeof(uint64_t));
  if (TableChecksum(header_.segment, table_) != footer_.table_checksum) {
    return Damaged(path, "the checksum table is damaged");
  }
  return {};
}

Status SegmentFile::LoadTokens(IoEngine& engine, const std::filesystem::path& path) {
  const uint64_t pages = layout_.manifest_page - layout_.token_page;
  AlignedBuffer buffer(pages * kPageBytes);
  PREFIXD_TRY(ReadFully(engine, fd_.get(), layout_.token_page * kPageBytes, buffer.span(),
                        IoPriority::kStepRead, path.string()));
  for (uint64_t i = 0; i < pages; ++i) {
    const ConstPageBytes page(buffer.data() + i * kPageBytes, kPageBytes);
    if (!VerifyPage(layout_.token_page + i, page))
      return Damaged(path, "its token ids are damaged");
  }
  tokens_.resize(layout_.n_tokens);
  std::memcpy(tokens_.data(), buffer.data(), tokens_.size() * sizeof(uint32_t));
  return {};
}

Result<std::shared_ptr<const SegmentFile>> SegmentFile::Open(IoEngine& engine,
                                                             const std::filesystem::path& path,
                                                             const SegmentRecord& record,
                                                             bool direct) {
  auto file = std::shared_ptr<SegmentFile>(new SegmentFile());
  PREFIXD_TRY(file->OpenEnds(engine, path, record, direct));
  PREFIXD_TRY(Twice([&] { return file->LoadTable(engine, path); }));
  PREFIXD_TRY(Twice([&] { return file->LoadTokens(engine, path); }));
  return std::shared_ptr<const SegmentFile>(std::move(file));
}

Result<SegmentHeader> SegmentFile::Check(IoEngine& engine, const std::filesystem::path& path,
                                         const SegmentRecord& record, bool direct) {
  SegmentFile file;
  PREFIXD_TRY(file.OpenEnds(engine, path, record, direct));
  return file.header_;
}

}  // namespace prefixd::storage
