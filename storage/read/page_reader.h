// Reads pieces of verified pages: host tier first, then the file in coalesced batches, several
// windows in flight. Every byte handed out passed its page's checksum.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "prefixd/result.h"
#include "storage/io/buffer_pool.h"
#include "storage/io/io_engine.h"
#include "storage/read/row_access.h"
#include "storage/segment/prefix_info.h"
#include "storage/segment/segment_file.h"
#include "storage/host_tier/tier_region.h"

namespace prefixd::storage {

// Part of one page and where it is wanted.
struct PagePiece {
  uint64_t page = 0;
  uint32_t offset = 0, bytes = 0;
  std::byte* out = nullptr;
};

inline constexpr size_t kReadBufferBytes = 2u << 20;  // of one window
// Read and verified in one go, with the next ones on their way.
inline constexpr size_t kWindowPages = kReadBufferBytes / kPageBytes;

struct ReadServices {
  IoEngine* engine = nullptr;
  TierRegion* tier = nullptr;  // of the tenant whose pages are read
  std::atomic<uint64_t>* bytes_read = nullptr;
  std::atomic<uint64_t>* checksum_failures = nullptr;
  // Told when a page did not verify twice.
  std::function<void(const SegmentId&, const std::string&)> on_corrupt;
  // How long ReadPieces waits for the disk, for each of its batches. 0: as long as it takes.
  std::chrono::milliseconds read_deadline{0};
  uint32_t max_gap_pages = 0;  // StoreOptions
  std::shared_ptr<BufferPool> buffers = std::make_shared<BufferPool>(kReadBufferBytes, 16);
};

// kDecoded: of a segment whose rows are encoded, each piece is one key or one value, and `out` gets
// its elements in the dtype that the header names. Otherwise the same as kAsStored.
enum class Deliver : uint8_t { kAsStored, kDecoded };

// `pieces` ascending by page. A failed or mismatching read is tried once more; then kIo or
// kCorrupt, and nothing in the outputs is meaningful. kUnavailable when the disk did not answer
// within services.read_deadline: that says nothing about the bytes, and the segment stays in use.
Status ReadPieces(const ReadServices& services, const SegmentFile& file,
                  std::span<const PagePiece> pieces, Access access, ReadStats* stats,
                  Deliver deliver = Deliver::kAsStored);

// As ReadPieces, of bytes as stored, but what the tier has, or of a point read takes, stays there:
// where[i] is the piece's first byte, in a page of the tier while `pins` (TierRegion::PinsForAStep)
// live, or else at the piece's `out`. REQUIRES: Access::kPoint or kScan.
Status ViewPieces(const ReadServices& services, const SegmentFile& file,
                  std::span<const PagePiece> pieces, std::span<const std::byte*> where,
                  Access access, PagePins& pins, ReadStats* stats);

// Pins the pages of `pieces` (ascending by page) in the tier, reading first what is not there:
// where[i] is the piece's first byte, in place while the pins live. All or an error; as ReadPieces,
// and kResourceExhausted where the tier can hold no more pinned pages. `out` of a piece is not
// used.
Result<PagePins> PinPieces(const ReadServices& services, const SegmentFile& file,
                           std::span<const PagePiece> pieces, std::span<const std::byte*> where,
                           ReadStats* stats);

// Reads into the tier, behind all other reads and a few at a time, what of `pages` (ascending) it
// lacks: of somebody who may want them, and who waits for nothing. Counts in `stats` what is read;
// ends when that is max_bytes, or soon after `stop` is set (kCancelled), whatever the disk does.
// kIo and kCorrupt as ReadPieces, without a deadline; kResourceExhausted once the tier takes no
// more. What was read before stays.
Status ReadPagesAhead(const ReadServices& services, const SegmentFile& file,
                      std::span<const uint64_t> pages, uint64_t max_bytes,
                      const std::atomic<bool>& stop, ReadStats* stats);

// Reads and verifies every page from `first_page` up to the checksum table; bypasses the tier.
// `page_done(n)` is called as pages are done and may return false to stop (kCancelled).
Status VerifyAllPages(const ReadServices& services, const SegmentFile& file,
                      const std::function<bool(uint64_t n)>& page_done, uint64_t first_page = 0,
                      size_t window_pages = kWindowPages);

}  // namespace prefixd::storage
