// Measures how prefetching rows changes the time of a decode's steps. The queries of head traces
// are stepped through a real store whose host tier begins with one step's rows, with a pause after
// each token as a decoder makes it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "bench/prompts/head_trace.h"
#include "measure/timing/statistics.h"
#include "prefixd/policy.h"
#include "prefixd/result.h"

namespace prefixd::bench {

struct PrefetchCase {
  uint32_t pause_ms = 0;
  StepPolicy::Prefetch prefetch;
  double tier = 0;  // the host tier's size as a share of all rows
  // Per token, over all layers.
  Spread ms, read_ms;
  double ssd_pages = 0;  // pages that steps waited for
  double prefetched_pages = 0,
         prefetch_used_pages = 0;  // prefetched, and the part that a step used
};

struct PrefetchSetting {
  std::filesystem::path dir;  // is made (must not exist) and removed at the end
  uint32_t n_layers = 0;      // the heads are split evenly among them, in order
  double fraction = 0.01;     // K as a share of the mid region
  uint32_t rounds = 3;        // rounds of every case, in turns
  std::vector<double> tiers;
  std::vector<uint32_t> pauses_ms;
  std::vector<StepPolicy::Prefetch> prefetch;
};

// All heads have the same shape, number of tokens and number of steps.
Result<std::vector<PrefetchCase>> MeasurePrefetch(std::span<const HeadTrace> heads,
                                                  const PrefetchSetting& setting);

}  // namespace prefixd::bench
