// Measures what steps read of a real store: replays a captured trace's sets against the stored
// prompt.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "bench/prompts/retrieval_trace.h"
#include "prefixd/result.h"

namespace prefixd::bench {

struct PageReads {
  double rows = 0, pages = 0;  // per step, over all layers and KV heads; means
  // 4096 * pages / bytes of the rows, key and value, as read and in the best packing. Below 1 is
  // possible where only values are read.
  double amplification = 0, best = 0;
};

struct StoredReads {
  std::string name;
  std::vector<PageReads> reads;     // [fraction]
  std::vector<double> ms_per_step;  // [fraction]; all layers and heads, one after the other
};

// Stores the trace's prompt with its own keys and values through the runtime and replays every set
// against a store without host tier, so that every page comes from the disk. Counts the pages that
// the store reports as read: in order of arrival, and reclustered as by default, whole rows and
// values alone. `dir` is made, and removed at the end.
Result<std::vector<StoredReads>> MeasureStoredReads(const RetrievalTrace& trace,
                                                    const std::filesystem::path& dir);

}  // namespace prefixd::bench
