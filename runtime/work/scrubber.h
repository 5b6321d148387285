// Verifies what is stored in a thread: first the ends of every segment, which opening the store
// does not wait for, then all of it, slowly and for ever (storage/store/scrub.h defines the order).
// The store itself quarantines or deletes what does not verify.
//
// Thread-safety: Stop may be called from any thread, more than once; it ends the work at once.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/work/worker.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

class Scrubber {
 public:
  // `storage` must outlive it. 0 bytes per second: no scrub, the ends alone.
  Scrubber(storage::PrefixStore* storage, uint64_t bytes_per_second, uint32_t interval_hours);
  Scrubber(const Scrubber&) = delete;
  Scrubber& operator=(const Scrubber&) = delete;

  void Stop() { worker_.Stop(); }

 private:
  storage::ScrubOptions Options(uint64_t bytes_per_second, uint32_t interval_hours);
  Worker::Next Take();
  void CheckEnds(const std::stop_token& stop);
  void Scrub();

  storage::PrefixStore* const storage_;
  const storage::ScrubOptions options_;
  // The worker alone uses these.
  bool ends_checked_ = false;
  Worker::Clock::time_point due_{};
  std::string failure_;  // the last error; an error that lasts is logged once
  Worker worker_;
};

}  // namespace prefixd
