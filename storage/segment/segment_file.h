// Opens one committed segment for reading: its file, its checksums, its token ids.
//
// Thread-safety: all methods may be called concurrently; the checksum table and each order are
// loaded once, on first use. Whoever needs what another thread loads waits for this file alone.
#pragma once

#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/call_scope.h"
#include "base/memory_budget.h"
#include "storage/io/file.h"
#include "storage/io/io_engine.h"
#include "storage/segment/page_seal.h"
#include "storage/segment/records.h"
#include "storage/segment/segment_format.h"

namespace prefixd::storage {

// A RunOrder holds the stored order of one run's rows (reclustered layout), both ways, or the rows
// that a compressed segment has of a run.
struct RunOrder {
  std::vector<uint16_t> slot_of;   // [own index]: slot in its chunk
  std::vector<uint16_t> token_in;  // [slot]: index in its chunk
  std::vector<uint32_t> kept;      // compressed [slot]: own index, ascending
};

class SegmentFile : public std::enable_shared_from_this<SegmentFile> {
 public:
  // Reads and verifies header, footer, checksum table and token ids. kCorrupt when the file is
  // missing, damaged, or differs from the record; kIo when it cannot be read; kUnavailable when the
  // disk did not answer a read within `deadline` (0: no deadline), now or later, for orders and the
  // manifest. kResourceExhausted, now or later, when `memory` has no room for what is loaded.
  // kFailedPrecondition when the file is encrypted and `keys` (null: none) lack its key.
  static Result<std::shared_ptr<const SegmentFile>> Open(IoEngine& engine,
                                                         const std::filesystem::path& path,
                                                         const SegmentRecord& record, bool direct,
                                                         std::chrono::milliseconds deadline = {},
                                                         const MemoryAccount& memory = {},
                                                         const KeyRing* keys = nullptr);
  // Reads header, footer and token ids, and of the checksum table the entries of the ids: what a
  // match needs, a hundredth of what Open reads of a long segment. Errors as those of Open.
  static Result<std::shared_ptr<const SegmentFile>> OpenIds(
      IoEngine& engine, const std::filesystem::path& path, const SegmentRecord& record, bool direct,
      std::chrono::milliseconds deadline = {}, const MemoryAccount& memory = {},
      const KeyRing* keys = nullptr);
  // Loads and verifies the whole checksum table, unless it is loaded: before pages are verified. A
  // load that failed is tried again by the next call.
  Status LoadTable(IoEngine& engine) const;
  // Reads and verifies header and footer only.
  static Result<SegmentHeader> Check(IoEngine& engine, const std::filesystem::path& path,
                                     const SegmentRecord& record, bool direct,
                                     const KeyRing* keys = nullptr,
                                     IoPriority priority = IoPriority::kStepRead);

  const SegmentRecord& record() const { return record_; }
  const SegmentHeader& header() const { return header_; }
  const SegmentLayout& layout() const { return layout_; }
  std::span<const uint32_t> tokens() const { return tokens_; }  // [own tokens]
  int fd() const { return fd_->get(); }

  // Returns whether `bytes` are the page `page` (below the table) as it was written, and decrypts
  // them where they lie if it is encrypted: once for each reading. REQUIRES: the table is loaded.
  bool VerifyPage(uint64_t page, PageBytes bytes) const {
    return seal_.Open(page, bytes, seal_.entry(table_.data(), page));
  }
  // Returns the same, and leaves the bytes as they are stored.
  bool CheckPage(uint64_t page, ConstPageBytes bytes) const {
    return seal_.Check(page, bytes, seal_.entry(table_.data(), page));
  }

  // Returns the manifest's bytes, verified (records.h decodes them).
  Result<std::string> Manifest(IoEngine& engine) const;

  // Returns the order of one run, or the list of a compressed segment; null in the arrival layout.
  // It lives as long as the file. kCorrupt when it does not verify: the caller quarantines.
  Result<const RunOrder*> Order(IoEngine& engine, uint32_t layer, uint32_t head) const;
  // Returns whether Order needs no read.
  bool HasOrder(uint32_t layer, uint32_t head) const;
  // Returns the memory that table, token ids and loaded orders take.
  uint64_t memory_bytes() const { return memory_bytes_.load(std::memory_order_relaxed); }

 private:
  SegmentFile() = default;
  // table: loads the checksum table, too.
  static Result<std::shared_ptr<const SegmentFile>> OpenParts(
      IoEngine& engine, const std::filesystem::path& path, const SegmentRecord& record, bool direct,
      std::chrono::milliseconds deadline, const MemoryAccount& memory, const KeyRing* keys,
      bool table);
  Status OpenEnds(IoEngine& engine, const std::filesystem::path& path, const SegmentRecord& record,
                  bool direct, const KeyRing* keys);
  Status ReadTable(IoEngine& engine) const;
  Status LoadTokens(IoEngine& engine);
  bool has_orders() const { return layout_.reclustered() || layout_.compressed(); }
  uint64_t OrderBytes() const;
  Result<std::unique_ptr<const RunOrder>> LoadOrder(IoEngine& engine, uint32_t layer,
                                                    uint32_t head) const;
  // Reads pages [first, first + n).
  Result<AlignedBuffer> ReadRaw(IoEngine& engine, uint64_t first, uint64_t n) const;
  // Reads the same pages and verifies them.
  Result<AlignedBuffer> ReadPages(IoEngine& engine, uint64_t first, uint64_t n,
                                  const char* what) const;

  SegmentRecord record_;
  std::filesystem::path path_;
  std::chrono::milliseconds deadline_{0};
  IoPriority priority_ = IoPriority::kStepRead;
  std::shared_ptr<const UniqueFd> fd_;  // shared with reads whose callers gave up
  SegmentHeader header_;
  SegmentFooter footer_;
  SegmentLayout layout_;
  PageSeal seal_;
  mutable CallMutex table_mutex_;  // held while the table is loaded
  mutable std::atomic<bool> has_table_{false};
  mutable std::vector<uint64_t> table_;  // [layout.table_words()]
  std::vector<uint32_t> tokens_;
  mutable std::atomic<uint64_t> memory_bytes_{0};
  mutable std::mutex orders_mutex_;
  mutable MemoryCharge memory_;  // guarded by orders_mutex_ once open
  mutable std::vector<std::unique_ptr<const RunOrder>> orders_;  // [runs], null: not loaded
};

// Opens with O_DIRECT if `direct` is set and the file system allows it. `path` names an existing
// file unless flags say otherwise.
Result<UniqueFd> OpenMaybeDirect(const std::filesystem::path& path, int flags, bool direct);

}  // namespace prefixd::storage
