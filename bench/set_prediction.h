// What foretells the set that a head's next step retrieves, from the sets before it: for reading
// rows ahead of a step.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "bench/support/head_trace.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// Foretold: the last set, and tokens up to `back` before and `forward` behind each of its tokens,
// or of the third of them that scored best. Means over heads and steps, in multiples of K.
struct Prediction {
  uint32_t back = 0, forward = 0;
  bool best_third = false;
  double found = 0;     // of a step's set, what was foretold
  double foretold = 0;  // tokens
  // What a memory that keeps all it was ever given would still have to read of a step's set if
  // nothing were read ahead (`missed`), and if all that is foretold were (`left`); and how much is
  // then read ahead, of which no later step uses `in_vain`.
  double missed = 0, left = 0, ahead = 0, in_vain = 0;
  // Of what it would have missed, how much is foretold for the head that is foretold best.
  double best_head = 0;
};

// fraction: K of the mid region. The heads may be of any lengths.
Result<std::vector<Prediction>> MeasurePredictions(std::span<const HeadTrace> heads,
                                                   double fraction);

}  // namespace prefixd::bench
