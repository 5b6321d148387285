// Measures how well the scan estimate computes from codes the mass of the tokens that a search has
// not retrieved, and what returning all scores costs.
#pragma once

#include <span>
#include <vector>

#include "bench/prompts/head_trace.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// Means over the steps and query heads of all heads, for one K. Errors are errors of log Z_R.
struct ScanMass {
  double fraction = 0;             // K as a share of the keys
  double share = 0;                // mean share of the mass that is not retrieved
  double codes_alone = 0;          // mean error of the uncorrected scores by codes
  double bias = 0, deviation = 0;  // error of the scores as the search returns them
  double of_all = 0;  // root mean square of error times share, which is the error of a step's lse
  // Medians, one thread: a search, a search that returns all scores, and the scores' sums by
  // cluster.
  double search_ms = 0, scores_ms = 0, sums_ms = 0;
  double extra_bytes = 0;  // read more by a search that returns all scores, as a share
};
Result<std::vector<ScanMass>> MeasureScanMasses(std::span<const HeadTrace> heads,
                                                std::span<const double> fractions);

}  // namespace prefixd::bench
