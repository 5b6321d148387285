// Brings back into the host tier, in a thread, what was used last before the store was opened
// (storage/store/warm_up.h), at the pace of background work.
//
// Thread-safety: Stop may be called from any thread, more than once; it ends the work at once.
#pragma once

#include <atomic>

#include "runtime/work/background_pace.h"
#include "runtime/work/worker.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

class WarmUp {
 public:
  // Both outlive it.
  WarmUp(storage::PrefixStore& storage, BackgroundPace& pace);
  ~WarmUp() { Stop(); }
  WarmUp(const WarmUp&) = delete;
  WarmUp& operator=(const WarmUp&) = delete;

  void Stop();

 private:
  void Run();

  storage::PrefixStore& storage_;
  BackgroundPace& pace_;
  std::atomic<bool> stop_{false};
  bool begun_ = false;  // the worker's alone
  Worker worker_;
};

}  // namespace prefixd
