// What a sealed segment file ends with, and what it may not lack.
#include <algorithm>
#include <cstring>

#include "storage/segment/segment_file_writer.h"

namespace prefixd::storage {

Status SegmentFileWriter::CopyPages(uint64_t first_page, std::span<const std::byte> pages) {
  if (!failed_.ok()) return failed_;
  const uint64_t rows = layout_.token_page - 1;
  const uint64_t next =
      pages_copied_ < rows ? 1 + pages_copied_ : layout_.order_page + (pages_copied_ - rows);
  const uint64_t n = pages.size() / kPageBytes;
  const uint64_t end = pages_copied_ < rows ? layout_.token_page : layout_.table_page;
  if (pages.size() % kPageBytes != 0 || first_page != next || n > end - next) {
    return InvalidArgument("pages are copied once and in ascending order");
  }
  failed_ = PutBytes(first_page, pages);
  if (failed_.ok()) pages_copied_ += n;
  return failed_;
}

Status SegmentFileWriter::CheckComplete(HeadRange heads) const {
  if (pages_copied_ > 0) {
    const uint64_t all = layout_.token_page - 1 + layout_.table_page - layout_.order_page;
    if (pages_copied_ == all) return {};
    return Error{Code::kFailedPrecondition, "the copied segment is incomplete"};
  }
  if (layout_.compressed()) {
    if (runs_written_ == layout_.runs()) return {};
    return Error{Code::kFailedPrecondition, "the compressed segment is incomplete"};
  }
  if (!layout_.reclustered()) return written_.CheckComplete(heads);
  if (chunks_written_ == uint64_t{layout_.runs()} * layout_.chunks()) return {};
  return Error{Code::kFailedPrecondition, "the reclustered segment is incomplete"};
}

Status SegmentFileWriter::WriteTableAndFooter(uint64_t sequence, int64_t unix_ms,
                                              const EncodingError& error) {
  const uint64_t pages = layout_.total_pages() - layout_.table_page;
  AlignedBuffer buffer(pages * kPageBytes);
  std::fill(buffer.span().begin(), buffer.span().end(), std::byte{0});
  std::memcpy(buffer.data(), table_.data(), table_.size() * sizeof(uint64_t));
  SegmentFooter footer;
  footer.file = plan_.header.file;
  footer.sequence = sequence;
  footer.total_pages = layout_.total_pages();
  footer.table_checksum = TableChecksum(plan_.header.file, layout_.table_page, table_);
  footer.manifest_bytes = plan_.header.manifest_bytes;
  footer.sealed_unix_ms = unix_ms;
  footer.error = error;
  footer.Encode(PageBytes(buffer.data() + (pages - 1) * kPageBytes, kPageBytes),
                plan_.cipher.get());
  PREFIXD_TRY(WriteFully(engine_, fd_.get(), layout_.table_page * kPageBytes, buffer.span(),
                         IoPriority::kCommit, "writing " + plan_.path.string()));
  bytes_written_ += buffer.size();
  return {};
}

}  // namespace prefixd::storage
