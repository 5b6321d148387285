// What a sealed segment file ends with, and what it may not lack.
#include <algorithm>
#include <cstring>

#include "storage/segment/segment_file_writer.h"

namespace prefixd::storage {

Status SegmentFileWriter::CheckComplete(HeadRange heads) const {
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
  footer.table_checksum = TableChecksum(plan_.header.file, table_);
  footer.manifest_bytes = plan_.header.manifest_bytes;
  footer.sealed_unix_ms = unix_ms;
  footer.error = error;
  footer.Encode(PageBytes(buffer.data() + (pages - 1) * kPageBytes, kPageBytes));
  PREFIXD_TRY(WriteFully(engine_, fd_.get(), layout_.table_page * kPageBytes, buffer.span(),
                         IoPriority::kCommit, "writing " + plan_.path.string()));
  bytes_written_ += buffer.size();
  return {};
}

}  // namespace prefixd::storage
