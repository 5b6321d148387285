// Measures how much consecutive steps of a decode have in common, independently of any sharing
// rule: the part of a step's Top-K that earlier steps read, and how few searches would do with the
// best choice of a set to share.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/prompts/retrieval_trace.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// Compares a step's Top-K with what the last `steps` steps retrieved; means over heads and steps.
struct ReuseResult {
  uint32_t steps = 0;  // 0: all earlier ones
  double found = 0;    // share of the set
  double held = 0;     // distinct tokens that they retrieved, in multiples of K
};

// Measures sets that are remembered for the whole decode, each widened by the neighbours of its
// best third.
struct RememberedResult {
  enum class Rule {
    kNearest,  // share the set whose query is the nearest, if its cosine is above `limit`
    kOracle,   // share the set with most of this step's attention, if it lacks at most `limit` of
               // Top-K's attention: no rule can do better
  };
  Rule rule = Rule::kOracle;
  double limit = 0;
  double rho = 0;        // searches per step
  double mass_loss = 0;  // relative to Top-K in every step
};

struct SetReuse {
  std::vector<ReuseResult> reuse;
  std::vector<RememberedResult> remembered;
};

// `fraction` is K as a share of the mid region.
Result<SetReuse> MeasureSetReuse(const RetrievalTrace& trace, double fraction);

}  // namespace prefixd::bench
