// Sets shared between steps (CIS) against Top-K in every step, on the heads of a captured decode.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bench/support/retrieval_trace.h"
#include "prefixd/result.h"
#include "prefixd/types.h"

namespace prefixd::bench {

// Means over heads, steps and query heads. Mass is the share of attention over the mid region.
struct SharingResult {
  StepPolicy::Sharing sharing;
  double rho = 0;            // retrievals made, of one for each step
  double tokens = 0;         // read by a step, of K
  double mass = 0;           // that is read
  double mass_loss = 0;      // below Top-K in every step
  double dropped_error = 0;  // relative l1 error of the output when the rest is dropped ...
  double error = 0;          // ... and when it is estimated by moments
  double scan_bytes = 0;     // codes read by a step's share of the searches, of all keys in bf16
};

// fraction: K of the mid region. The first result is Top-K in every step.
Result<std::vector<SharingResult>> MeasureSharing(const RetrievalTrace& trace, double fraction,
                                                  std::span<const StepPolicy::Sharing> settings);

// Of results in blocks of 16 steps and more, without sharing across blocks, that retrieve in at
// most a tenth of the steps: the one that loses least mass. Null: there is none.
const SharingResult* LeastLoss(std::span<const SharingResult> results);

}  // namespace prefixd::bench
