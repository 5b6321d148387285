// Waits until what reads segments behind a store's start has ended, so that faults that a test arms
// meet whom the test names.
#pragma once

#include <chrono>
#include <thread>

#include "prefixd/store.h"

namespace prefixd::testing {

inline void WaitChecked(Store& store) {
  for (auto stats = store.Stats();
       stats.ok() && stats->unchecked_segments + stats->ingest_queue > 0; stats = store.Stats()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace prefixd::testing
