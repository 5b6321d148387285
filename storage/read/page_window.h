// Reads and verifies a window of pages together: the unit in which page readers work, several in
// flight, so that the disk works while one is verified.
//
// Thread-safety: used by one thread.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "prefixd/result.h"
#include "storage/io/io_engine.h"
#include "storage/read/page_reader.h"

namespace prefixd::storage {

// A PageWindow reads sets of ascending pages into scratch memory and verifies them. Pages with at
// most `max_gap` others between them share an operation; the pages between are read and ignored.
class PageWindow {
 public:
  // stop: null, or a flag that ends the waiting once it is set.
  PageWindow(const ReadServices& services, const SegmentFile& file, IoPriority priority,
             std::chrono::milliseconds deadline, uint32_t max_gap = 0,
             const std::atomic<bool>* stop = nullptr)
      : services_(services),
        file_(file),
        priority_(priority),
        deadline_(deadline),
        max_gap_(max_gap),
        stop_(stop) {}
  ~PageWindow();
  PageWindow(const PageWindow&) = delete;
  PageWindow& operator=(const PageWindow&) = delete;

  // Returns how many more pages fit for certain when `slots` are taken.
  size_t Room(size_t slots) const { return (kWindowPages - slots) / (1 + max_gap_); }
  // Returns the slots taken by `page` behind `before` (null: it is the first page).
  size_t SlotsOf(uint64_t page, const uint64_t* before) const {
    return before != nullptr && page - *before <= 1 + max_gap_ ? page - *before : 1;
  }

  void Start(std::vector<uint64_t> pages);
  // Waits and verifies. On success page(i) holds the bytes of pages()[i]. A failed or mismatching
  // read is tried once more; then kIo, or kCorrupt, which is reported to services.on_corrupt.
  // kUnavailable at the deadline; kCancelled soon after `stop` is set, however long the disk takes.
  Status Finish();

  const std::vector<uint64_t>& pages() const;
  uint64_t bytes() const;  // bytes of all operations
  ConstPageBytes page(size_t i) const;

 private:
  struct Flight;

  IoOp ReadOp(uint64_t page, size_t slot, size_t n) const;
  bool Verify(size_t i);             // what was read of pages()[i], once
  void Submit(std::span<IoOp> ops);  // operations of the flight
  Status Await();
  bool Stopped();  // while waiting: true once `stop` was set
  Status Again(IoOp& op);
  // Reads the pages of an operation that failed, one by one.
  Status ReadWithoutGaps(const IoOp& failed);
  Status ReadAgain(size_t i);
  Error TimedOut() const;

  const ReadServices& services_;
  const SegmentFile& file_;
  const IoPriority priority_;
  const std::chrono::milliseconds deadline_;  // 0: none
  const uint32_t max_gap_;
  const std::atomic<bool>* const stop_;
  std::shared_ptr<Flight> flight_;
  bool started_ = false;  // submitted and not waited for
};

}  // namespace prefixd::storage
