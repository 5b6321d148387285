// What steps read of a real store: a captured trace's sets, replayed against the stored prompt.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "bench/support/retrieval_trace.h"
#include "prefixd/result.h"

namespace prefixd::bench {

struct PageReads {
  double rows = 0, pages = 0;  // of one step, all layers and KV heads; means
  // 4096 * pages / bytes of the rows, key and value, as read and in the best packing: below 1 is
  // possible where values alone are read.
  double amplification = 0, best = 0;
};

struct StoredReads {
  std::string name;
  std::vector<PageReads> reads;     // by fraction
  std::vector<double> ms_per_step;  // by fraction: all layers and heads, one after the other
};

// Stores the trace's prompt with its own keys and values through the runtime, replays every set
// against a store with no host tier (so every page comes from the disk), and counts the pages the
// store says it read: in order of arrival, and settled as by default, whole rows and values alone.
// `dir` is made, and removed in the end.
Result<std::vector<StoredReads>> MeasureStoredReads(const RetrievalTrace& trace,
                                                    const std::filesystem::path& dir);

}  // namespace prefixd::bench
