// How much consecutive steps of a decode have in common, whatever rule one shares sets by: what of
// a step's Top-K earlier steps read, and how few searches would do if one knew which set to share.
#pragma once

#include <cstdint>
#include <vector>

#include "bench/support/retrieval_trace.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// Of a step's Top-K, what the last `steps` steps had retrieved; means over heads and steps.
struct ReuseResult {
  uint32_t steps = 0;  // 0: all earlier ones
  double found = 0;    // share of the set
  double held = 0;     // distinct tokens retrieved by them, in multiples of K
};

// Sets remembered for the whole decode, each widened by the neighbours of its best third.
struct RememberedResult {
  enum class Rule {
    kNearest,  // share the set whose query is the nearest, if its cosine is above `limit`
    kOracle,   // share the set with most of this step's attention, if it lacks at most `limit` of
               // what Top-K has: what no rule can do better
  };
  Rule rule = Rule::kOracle;
  double limit = 0;
  double rho = 0;        // searches, of one for each step
  double mass_loss = 0;  // below Top-K in every step
};

struct SetReuse {
  std::vector<ReuseResult> reuse;
  std::vector<RememberedResult> remembered;
};

// fraction: K of the mid region.
Result<SetReuse> MeasureSetReuse(const RetrievalTrace& trace, double fraction);

}  // namespace prefixd::bench
