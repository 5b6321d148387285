// Stores head traces as a prompt of a real store, and replays their queries as steps of its
// sessions.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "bench/prompts/head_trace.h"
#include "bench/prompts/retrieval_trace.h"
#include "prefixd/kv_shape.h"
#include "prefixd/result.h"
#include "runtime/store/local_store.h"

namespace prefixd::bench {

// Writes and commits a whole trace as a prompt of a model of this name, which it registers; returns
// its prefix. With `queries` the put keeps the trace's samples, so that what depends on them is
// made.
Result<std::string> PutTrace(Store& store, const std::string& model, const RetrievalTrace& trace,
                             bool queries);

// Borrows the traces. All have the same shape, number of tokens and number of steps. They are split
// evenly among n_layers layers (at least 1), in order.
class TracedPrompt {
 public:
  TracedPrompt(std::span<const HeadTrace> heads, uint32_t n_layers);

  const KvGeometry& geometry() const { return geometry_; }
  std::vector<uint32_t> tokens() const;
  uint32_t n_tokens() const { return n_tokens_; }
  uint64_t row_bytes() const;
  const char* model() const { return "traced"; }
  Status Register(Store& store) const;
  // Writes and commits the prompt; returns its prefix. Keys are the traces'; values are arbitrary,
  // because no figure depends on them.
  //   sampled_at: the token of each of the traces' sample queries, ascending, for the put to keep;
  //               empty: it keeps none
  Result<std::string> Put(Store& store, std::span<const uint32_t> sampled_at) const;
  // Returns the queries of a step of `layer`: [n_q_heads][key_dim].
  std::vector<float> Queries(uint32_t layer, size_t step) const;

 private:
  std::span<const HeadTrace> OfLayer(uint32_t layer) const {
    return heads_.subspan(size_t{layer} * geometry_.n_kv_heads, geometry_.n_kv_heads);
  }

  const std::span<const HeadTrace> heads_;
  const uint32_t n_tokens_;
  KvGeometry geometry_;
};

}  // namespace prefixd::bench
