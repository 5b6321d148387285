// Compares sets shared between steps (CIS) with Top-K in every step, on the heads of a captured
// decode.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "bench/prompts/retrieval_trace.h"
#include "prefixd/policy.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// Members are means over heads, steps and query heads. Mass is the share of attention over the mid
// region.
struct SharingResult {
  StepPolicy::Sharing sharing;
  double rho = 0;            // retrievals per step
  double tokens = 0;         // read by a step, in multiples of K
  double mass = 0;           // mass of the tokens read
  double mass_loss = 0;      // relative to Top-K in every step
  double dropped_error = 0;  // relative l1 error of the output when the rest is dropped ...
  double error = 0;          // ... and when it is estimated by moments
  double scan_bytes = 0;     // codes read per step, as a share of all keys in bf16
};

using HeadsDone = std::function<void(size_t done, size_t all)>;

// `fraction` is K as a share of the mid region. The first result is Top-K in every step.
// `progress`, if set, is called after each head.
Result<std::vector<SharingResult>> MeasureSharing(const RetrievalTrace& trace, double fraction,
                                                  std::span<const StepPolicy::Sharing> settings,
                                                  const HeadsDone& progress = {});

// Returns the result that loses least mass among those with blocks of at least 16 steps, no sharing
// across blocks, and retrievals in at most a tenth of the steps. Returns null if there is none.
const SharingResult* LeastLoss(std::span<const SharingResult> results);

}  // namespace prefixd::bench
