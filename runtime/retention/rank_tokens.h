// Ranks tokens of one KV head by a retention policy: the one interface to all of them.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/rows/rows.h"
#include "prefixd/kv_shape.h"
#include "prefixd/partition.h"
#include "runtime/retention/scores.h"
#include "runtime/retention/token_scorer.h"

namespace prefixd {

// The queries of one token of the head's group.
struct SeenQuery {
  uint32_t position = 0;     // they see rows [0, position]
  std::span<const float> q;  // [G][key_dim]
};

struct RankInput {
  RetentionPolicy policy = RetentionPolicy::kLocal;
  LayerGeometry layer;
  uint32_t group = 0;  // G
  RowsView rows;       // what queries attend to, by ascending position of the tokens
  TokenRange region;   // the candidates, of rows
  std::span<const SeenQuery> queries;   // by ascending position
  const TokenScorer* scorer = nullptr;  // of kKvPop alone
  // [region] what candidates counted for before (Ranking::memory); NaN of new ones. Empty: all are
  // new.
  std::span<const double> past;
  // [rows] where they lie in the text, by which kKvPop lets them age. Empty: without a gap.
  std::span<const uint32_t> positions;
};

struct Ranking {
  std::vector<double> scores;  // [region] the highest are kept; never NaN
  // [region] what the next ranking is to know as `past`; empty: nothing.
  std::vector<double> memory;
};

Ranking RankTokens(const RankInput& in);

// Returns the memory that RankTokens takes beside its input, in bytes.
uint64_t RankBytes(const RankInput& in);

}  // namespace prefixd
