// Describes what one KV head sees during a decode: stored keys, a sample of the prefill's queries,
// and the queries of consecutive steps. It is captured from a real decoder, or synthetic with a
// realistic shape.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/rows/rows.h"
#include "bench/prompts/retrieval_trace.h"

namespace prefixd::bench {

struct HeadTrace {
  std::string name;
  uint32_t group = 0;
  LayerGeometry layer;
  RowShape shape;                     // keys alone, bf16
  std::vector<std::byte> keys;        // [n][key_bytes]: the mid region
  std::vector<float> sample_queries;  // [n][group][key_dim], kept by the put
  std::vector<float> step_queries;    // [steps][group][key_dim]

  RowsView view() const { return {keys.data(), keys.size() / shape.bytes(), shape.bytes(), shape}; }
  size_t n_steps() const { return step_queries.size() / (size_t{group} * shape.key_dim); }
  std::span<const float> step(size_t s) const {
    const size_t floats = size_t{group} * shape.key_dim;
    return std::span(step_queries).subspan(s * floats, floats);
  }
};

// Returns the trace of every (layer, KV head) of the captured decode.
std::vector<HeadTrace> HeadTraces(const RetrievalTrace& trace);

// Makes keys and queries like those of decoders (head_trace.cc says what each part stands for).
// Text drifts through topics of low rank, some channels are outliers, queries are shifted away from
// the keys and aim at a few topics at once, and RoPE turns both. Steps follow one another as in
// decoding: mostly alike, now and then about something else.
struct SyntheticOptions {
  uint32_t n_tokens = 131072, key_dim = 128, group = 4;
  uint32_t samples = 64, steps = 64;
  uint64_t seed = 1;
};
HeadTrace SyntheticHead(const SyntheticOptions& options);
// Returns the token of each of the head's sample queries, ascending.
std::vector<uint32_t> SampledAt(const SyntheticOptions& options);

}  // namespace prefixd::bench
