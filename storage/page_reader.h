// Reads pieces of verified pages: host tier first, then the file in coalesced batches, two windows
// in flight. Every byte handed out passed its page's checksum.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "attention/result.h"
#include "storage/host_tier.h"
#include "storage/io_engine.h"
#include "storage/prefix_store.h"
#include "storage/segment_file.h"

namespace prefixd::storage {

// Part of one page and where it is wanted.
struct PagePiece {
  uint64_t page = 0;
  uint32_t offset = 0, bytes = 0;
  std::byte* out = nullptr;
};

// Read and verified in one go, with the next ones on their way.
inline constexpr size_t kWindowPages = 1024;

struct ReadServices {
  IoEngine* engine = nullptr;
  HostTier* tier = nullptr;
  std::atomic<uint64_t>* bytes_read = nullptr;
  std::atomic<uint64_t>* checksum_failures = nullptr;
  // Told when a page did not verify twice.
  std::function<void(const SegmentId&, const std::string&)> on_corrupt;
};

// `pieces` ascending by page. A failed or mismatching read is tried once more; then kIo or
// kCorrupt, and nothing in the outputs is meaningful.
Status ReadPieces(const ReadServices& services, const SegmentFile& file,
                  std::span<const PagePiece> pieces, Access access, ReadStats* stats);

// Reads and verifies every page from `first_page` up to the checksum table; bypasses the tier.
// `page_done(n)` is called as pages are done and may return false to stop (kCancelled).
Status VerifyAllPages(const ReadServices& services, const SegmentFile& file,
                      const std::function<bool(uint64_t n)>& page_done, uint64_t first_page = 0,
                      size_t window_pages = kWindowPages);

}  // namespace prefixd::storage
