// Samples a prefill's own queries, from which ingest chooses estimators per head ([RC]: queries
// are causal, so they come from the last quarter of the prompt and are scored on the keys before
// it).
//
// Thread-safety: plain values.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"

namespace prefixd {

// Returns where the last quarter of n tokens begins: samples come from [this, n).
constexpr uint32_t LastQuarterBegin(uint32_t n_tokens) { return n_tokens - n_tokens / 4; }

struct QuerySamples {
  uint32_t prompt_tokens = 0;           // length of the prefill that they come from
  uint32_t n_q_heads = 0, key_dim = 0;  // the model's
  struct Layer {
    uint32_t n_q_heads = 0, key_dim = 0;
    std::vector<uint32_t> positions;  // ascending
    std::vector<float> q;             // [positions.size()][n_q_heads][key_dim]

    size_t token_floats() const { return size_t{n_q_heads} * key_dim; }
  };
  std::vector<Layer> layers;

  bool empty() const;
  std::vector<std::byte> Serialize() const;
  // kCorrupt for malformed bytes, another geometry, or a value that is not finite.
  static Result<QuerySamples> Deserialize(std::span<const std::byte> bytes,
                                          const KvGeometry& geometry);
};

// Joins samples of runs of query heads, in order of heads, to those of all. A token stays that all
// of them have.
QuerySamples JoinHeads(std::vector<QuerySamples> parts);

// Keeps a uniform sample of at most `capacity` tokens per layer. Each token has a fixed
// pseudo-random rank and the lowest ranks stay: the sample does not depend on the order of arrival,
// and all layers keep the same tokens.
class QueryReservoir {
 public:
  QueryReservoir(const KvGeometry& geometry, uint32_t prompt_tokens, uint32_t capacity);

  // q: [n][n_q_heads][key_dim], for tokens [first, first + n).
  void Add(uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q);
  QuerySamples Take() const;

 private:
  struct Kept {
    uint32_t position = 0;
    std::vector<float> q;  // [n_q_heads][key_dim]
  };
  struct Layer {
    LayerShape shape;
    std::map<uint64_t, Kept> kept;  // by rank
  };

  uint32_t prompt_tokens_, capacity_, n_q_heads_, key_dim_;
  std::vector<Layer> layers_;
};

}  // namespace prefixd
