// What steps read of a real store: a captured trace's sets, replayed against the stored prompt.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "bench/support/page_reads.h"
#include "prefixd/result.h"

namespace prefixd::bench {

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
