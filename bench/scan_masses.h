// What the estimate by scan makes of what codes say: the mass of the tokens that a search has not
// retrieved, and what asking for all scores costs.
#pragma once

#include <span>
#include <vector>

#include "bench/support/head_trace.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// Over the steps and query heads of all heads, for one K. Errors are of log Z_R.
struct ScanMass {
  double fraction = 0;             // K, of the keys
  double share = 0;                // of the mass, not retrieved: mean
  double codes_alone = 0;          // mean error of the scores by codes as they are
  double bias = 0, deviation = 0;  // of the scores as they are told
  double of_all = 0;               // root mean square of error times share: of a step's lse
  // Medians, one thread: a search; the same telling all scores; their sums by cluster.
  double search_ms = 0, scores_ms = 0, sums_ms = 0;
  double extra_bytes = 0;  // read by a search that tells all scores, of what the other one reads
};
Result<std::vector<ScanMass>> MeasureScanMasses(std::span<const HeadTrace> heads,
                                                std::span<const double> fractions);

}  // namespace prefixd::bench
