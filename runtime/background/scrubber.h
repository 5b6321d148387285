// The thread that verifies what is stored, slowly and for ever (storage/store/scrub.h says in which
// order). What it finds is quarantined or deleted by the store itself.
//
// Thread-safety: Stop may be called from any thread, more than once; it ends the work at once.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

#include "storage/store/prefix_store.h"

namespace prefixd {

class Scrubber {
 public:
  // `storage` must outlive it. 0 bytes per second: no scrub.
  Scrubber(storage::PrefixStore* storage, uint64_t bytes_per_second, uint32_t interval_hours);
  ~Scrubber() { Stop(); }
  Scrubber(const Scrubber&) = delete;
  Scrubber& operator=(const Scrubber&) = delete;

  void Stop();

 private:
  void Loop(const storage::ScrubOptions& options);
  // False when it is time to stop.
  bool Wait(std::chrono::nanoseconds pause);

  storage::PrefixStore* const storage_;
  std::mutex mutex_;
  std::condition_variable stop_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace prefixd
