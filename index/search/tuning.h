// An index set so that it finds enough, and what it then finds on queries that it was not set by.
//
// Queries are those of the prefill itself, scored against the keys that they saw ([RC]). One
// half chooses how much the index looks at; the other half says what that is worth.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/rows/rows.h"
#include "index/search/key_index.h"
#include "prefixd/result.h"

namespace prefixd::index {

// Queries and where each stood: it saw the keys of tokens before that.
struct CausalQueries {
  std::vector<float> q;             // [positions.size()][group][key_dim], finite
  std::vector<uint32_t> positions;  // ascending
};

struct TuningInput {
  const CausalQueries& tune;
  const CausalQueries& held_out;
  uint32_t group = 0;
  LayerGeometry layer;
  RowsView keys;           // of index.covered(), in memory
  double fraction = 0.01;  // of the keys that a query saw are asked for
  double target = 0.95;    // recall of these
};

// What an index finds of the tokens that an exact search returns: means over queries.
struct MeasuredRecall {
  uint32_t k = 0;        // most that a query asked for
  uint32_t queries = 0;  // 0: nothing was measured
  double recall = 0;     // recall@k
  double mass = 0;       // recovered attention mass over that of the exact set, worst query head
};

// Sets the least of index.efforts() that reaches the target, with some room, on `tune` (the most if
// none does) and returns what `held_out` finds then, or `tune` where that is empty. Queries that
// saw fewer than kMinCodeKeys keys of the index say nothing about it and do not count.
// kInvalidArgument as KeyIndex::Search.
Result<MeasuredRecall> Tune(KeyIndex& index, const TuningInput& input);

}  // namespace prefixd::index
