// One committed segment, open for reading: its file, its checksums, its token ids.
//
// Thread-safety: immutable after Open; all methods may be called concurrently.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <vector>

#include "storage/file.h"
#include "storage/io_engine.h"
#include "storage/records.h"
#include "storage/segment_format.h"

namespace prefixd::storage {

class SegmentFile : public std::enable_shared_from_this<SegmentFile> {
 public:
  // Reads and verifies header, footer, checksum table and token ids. kCorrupt when the file is
  // missing, damaged, or not what the record says; kIo when it cannot be read.
  static Result<std::shared_ptr<const SegmentFile>> Open(IoEngine& engine,
                                                         const std::filesystem::path& path,
                                                         const SegmentRecord& record, bool direct);
  // Header and footer only: the quick check at recovery.
  static Status Check(IoEngine& engine, const std::filesystem::path& path,
                      const SegmentRecord& record, bool direct);

  const SegmentRecord& record() const { return record_; }
  const SegmentHeader& header() const { return header_; }
  const SegmentLayout& layout() const { return layout_; }
  std::span<const uint32_t> tokens() const { return tokens_; }  // [own tokens]
  int fd() const { return fd_.get(); }

  // Whether `bytes` are the page `page` (below the table) as it was written.
  bool VerifyPage(uint64_t page, ConstPageBytes bytes) const {
    return PageChecksum(header_.segment, page, bytes) == table_[page];
  }

 private:
  SegmentFile() = default;
  Status OpenEnds(IoEngine& engine, const std::filesystem::path& path, const SegmentRecord& record,
                  bool direct);
  Status LoadTable(IoEngine& engine, const std::filesystem::path& path);
  Status LoadTokens(IoEngine& engine, const std::filesystem::path& path);

  SegmentRecord record_;
  UniqueFd fd_;
  SegmentHeader header_;
  SegmentFooter footer_;
  SegmentLayout layout_;
  std::vector<uint64_t> table_;  // [layout.table_page]
  std::vector<uint32_t> tokens_;
};

// Opens with O_DIRECT if asked and possible. `path` names an existing file unless flags say so.
Result<UniqueFd> OpenMaybeDirect(const std::filesystem::path& path, int flags, bool direct);

}  // namespace prefixd::storage
