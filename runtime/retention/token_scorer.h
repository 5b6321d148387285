// Scores tokens by what a small trained network makes of their keys and values, for one KV head: by
// the two scorers of [KVpop] (docs/mathematics.md). python/prefixd/retention/scorers.py trains
// them, for all heads at once.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <variant>
#include <vector>

#include "attention/rows/rows.h"
#include "prefixd/partition.h"
#include "prefixd/result.h"

namespace prefixd {

// score = w2 SiLU(w1 x + b1) + b2.
struct MlpWeights {
  std::vector<float> w1;      // [width, hidden]
  std::vector<float> b1, w2;  // [hidden]
  float b2 = 0;
};

// score = a SiLU(h) + b, where h is what a matrix memory (mLSTM) gives to the token's own query
// once it has read the tokens of the window behind it. Queries and keys of the memory have
// 2 half features: softmax(x w), softmax(-x w).
struct MlstmWeights {
  std::vector<float> wq, wk, wv;  // [width, half]
  std::vector<float> wi, wf;      // [width]: its gates
  float bi = 0, bf = 0;
  std::vector<float> a;  // [half]
  float b = 0;
};

struct TokenScorer {
  std::vector<float> mean, scale;  // [width = key_dim + value_dim]: x = ([k; v] - mean) / scale
  double log_decay = 0;            // a token of age n counts n log_decay more
  uint32_t window = 0;             // newest tokens, which have no score yet
  std::variant<MlpWeights, MlstmWeights> weights;

  // kInvalidArgument: sizes that do not belong together, or values that are not finite.
  Status Validate() const;
};

// Returns what orders the tokens of `region` under every later query: score less position times
// log_decay. Tokens of the window at the end of `rows` come before all others. rows: of all tokens
// from 0 on, or of those that are left of them, of a shape whose key and value make the scorer's
// width.
std::vector<double> TokenPriorities(const TokenScorer& scorer, const RowsView& rows,
                                    TokenRange region);

}  // namespace prefixd
