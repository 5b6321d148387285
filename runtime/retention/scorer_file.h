// Reads the scorers of a model's tokens (token_scorer.h) from a safetensors file, as
// `python -m prefixd.retention --train` writes it.
//
// Tensors, for each layer l with H KV heads of width = key_dim + value_dim:
//   layers.{l}.mean, .scale [H, 1, width]   .decay [H]: with s its sigmoid, a token
//   loses (1 - s) log 0.999 + s log 0.999999 with each token of age
// and of "kvpop-mlp"   .w1 [H, width, hidden]  .b1 [H, 1, hidden]  .w2 [H, hidden, 1]  .b2 [H, 1]
// or of "kvpop-mlstm"  .wq, .wk, .wv [H, width, half]  .wi, .wf [H, width, 1]  .bi, .bf [H, 1]
//                      .a [H, half, 1]  .b [H, 1]
// Metadata (strings): format = "prefixd-scorers-v1", scorer (one of the two), weights (digest of
// the weights that they were trained for, "blake2b:<hex>"), window (tokens). Others are ignored.
//
// Thread-safety: free functions; concurrent calls are fine.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "prefixd/model.h"
#include "prefixd/result.h"
#include "runtime/retention/token_scorer.h"
#include "tensors/safetensors.h"

namespace prefixd {

inline constexpr std::string_view kScorerFormat = "prefixd-scorers-v1";

// Returns what LoadScorers takes in memory.
uint64_t ScorerBytes(const SafetensorsFile& file);

// Returns the scorer of each KV head of each layer, in HeadIndex's order. kInvalidArgument: the
// file holds no scorers, not all of them, or those of another model.
Result<std::vector<TokenScorer>> LoadScorers(const SafetensorsFile& file, const ModelSpec& spec);

}  // namespace prefixd
