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
#include <vector>

#include "prefixd/result.h"
#include "prefixd/row_ref.h"
#include "storage/host_tier/tier_region.h"
#include "storage/io/buffer_pool.h"
#include "storage/io/io_engine.h"
#include "storage/read/row_access.h"
#include "storage/segment/prefix_info.h"
#include "storage/segment/segment_file.h"

namespace prefixd::storage {

// A PagePiece is a part of one page and its destination, or several parts of the same size: part i
// lies at offset + i * step and goes to out + PlaceOf(i) * out_step.
struct PagePiece {
  PagePiece(uint64_t of_page, uint32_t at, uint32_t n_bytes, std::byte* to)
      : page(of_page),
        out(to),
        offset(static_cast<uint16_t>(at)),
        bytes(static_cast<uint16_t>(n_bytes)) {}

  size_t PlaceOf(uint32_t i) const { return places == nullptr ? i : places[i]; }
  // Returns what copies the piece from `source`, its first byte.
  RowCopy From(const std::byte* source) const {
    return {source, out, bytes, n, step, out_step, places};
  }
  uint32_t all_bytes() const { return uint32_t{n} * bytes; }

  uint64_t page;
  std::byte* out;
  uint16_t offset, bytes;  // a page has 4,096
  uint16_t n = 1, step = 0;
  size_t out_step = 0;
  const uint16_t* places = nullptr;  // [n]; null: 0, 1, ...
};

inline constexpr size_t kReadBufferBytes = 2u << 20;  // bytes of one window
// Pages of one window: read and verified in one go, while the next windows are being read.
inline constexpr size_t kWindowPages = kReadBufferBytes / kPageBytes;

struct ReadServices {
  IoEngine* engine = nullptr;
  TierRegion* tier = nullptr;  // the tier of the tenant whose pages are read
  std::atomic<uint64_t>* bytes_read = nullptr;
  std::atomic<uint64_t>* checksum_failures = nullptr;
  // Called when a page failed to verify twice.
  std::function<void(const SegmentId&, const std::string&)> on_corrupt;
  // Bounds how long ReadPieces waits for the disk, for each of its batches. 0: no bound.
  std::chrono::milliseconds read_deadline{0};
  uint32_t max_gap_pages = 0;  // StoreOptions
  std::shared_ptr<BufferPool> buffers = std::make_shared<BufferPool>(kReadBufferBytes, 16);
  MemoryAccount memory = {};  // counts buffers in use
};

// kDecoded: in a segment whose rows are encoded, each piece is one key or one value, and `out` gets
// its elements in the dtype that the header names. Otherwise the same as kAsStored.
enum class Deliver : uint8_t { kAsStored, kDecoded };

// Reads `pieces`, ascending by page. A failed or mismatching read is tried once more; then kIo or
// kCorrupt, and the contents of the outputs are meaningless. kUnavailable when the disk did not
// answer within services.read_deadline: that says nothing about the bytes, and the segment stays in
// use.
Status ReadPieces(const ReadServices& services, const SegmentFile& file,
                  std::span<const PagePiece> pieces, Access access, ReadStats* stats,
                  Deliver deliver = Deliver::kAsStored);

// Reads like ReadPieces, bytes as stored, but leaves in place what the tier has, or takes for a
// point read: where[i] is the piece's first byte, in a page of the tier while `pins`
// (TierRegion::PinsForAStep) live, or else at the piece's `out`. REQUIRES: pieces of one part;
// Access::kPoint or kScan.
Status ViewPieces(const ReadServices& services, const SegmentFile& file,
                  std::span<const PagePiece> pieces, std::span<const std::byte*> where,
                  Access access, PagePins& pins, ReadStats* stats);

// Pins the pages of `pieces` (ascending by page) in the tier and first reads those that are not
// there: where[i] is the piece's first byte, in place while the pins live. Returns all pins or an
// error: those of ReadPieces, and kResourceExhausted where the tier can hold no more pinned pages.
// `out` of a piece is not used. REQUIRES: pieces of one part.
Result<PagePins> PinPieces(const ReadServices& services, const SegmentFile& file,
                           std::span<const PagePiece> pieces, std::span<const std::byte*> where,
                           ReadStats* stats);

// Pins the pages of `pieces` (ascending by page) if the tier has all of them, reads nothing, and
// adds what copies each piece to its `out`, which it does not look at. kNotFound: a page is not
// there; kResourceExhausted as PinPieces; `copies` are meaningless then.
Result<PagePins> PinHeldPieces(const ReadServices& services, const SegmentFile& file,
                               std::span<const PagePiece> pieces, std::vector<RowCopy>& copies,
                               ReadStats* stats);

// How pages are read that nobody waits for. At a time few are: others at the same place in the
// queue (the scrub, and preloading of keys) soon have their turn, and a step that comes meanwhile
// finds the disk free.
struct ReadAhead {
  Access access = Access::kPrefetch;  // with which the tier takes them
  size_t pages_at_once = 4;           // at most kWindowPages
  uint64_t max_bytes = UINT64_MAX;
};

// Reads into the tier, behind all other reads, those of `pages` (ascending) that it lacks. Counts
// the pages read in `stats`; ends at max_bytes, or soon after `stop` is set (kCancelled), whatever
// the disk does. kIo and kCorrupt as in ReadPieces, without a deadline; kResourceExhausted once the
// tier takes no more. Pages read before an error stay.
Status ReadPagesAhead(const ReadServices& services, const SegmentFile& file,
                      std::span<const uint64_t> pages, const ReadAhead& how,
                      const std::atomic<bool>& stop, ReadStats* stats);

// Reads and verifies every page from `first_page` up to the checksum table; bypasses the tier.
// `page_done(n)` is called as pages are done and may return false to stop (kCancelled).
Status VerifyAllPages(const ReadServices& services, const SegmentFile& file,
                      const std::function<bool(uint64_t n)>& page_done, uint64_t first_page = 0,
                      size_t window_pages = kWindowPages);

}  // namespace prefixd::storage
