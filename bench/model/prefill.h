// Prefills a prompt with a real model, alone and while it is stored, and lays rows end to end.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "decoder/attention/local_attention.h"
#include "decoder/model/model.h"
#include "prefixd/client.h"

namespace prefixd::bench {

// A prompt that was prefilled: the decoder's own cache, and queries for puts of the same rows.
struct Prefilled {
  std::unique_ptr<decoder::LocalAttention> attention;
  uint32_t queries_from = 0;                // queries of earlier tokens are not kept
  std::vector<std::vector<float>> queries;  // [layer] of [n][n_q_heads][key_dim]
  std::vector<float> logits;                // of the last token
  double seconds = 0;
};
Result<Prefilled> Prefill(const decoder::Model& model, std::span<const uint32_t> tokens);

struct StoredPrefill {
  std::string prefix;
  double seconds = 0;        // until the commit has returned: every row is durable
  double ready_seconds = 0;  // from then on, until summaries, indexes and choices are there
  uint64_t bytes = 0;
};
// Prefills and streams what passes into the store. The caller waits for what is derived, if
// `wait_ready` is false.
Result<StoredPrefill> PrefillAndStore(const decoder::Model& model, Store& store,
                                      const std::string& name, std::span<const uint32_t> tokens,
                                      bool wait_ready = true);

// Puts `n_tokens` rows: those of the prompt, again and again. Their positions mean nothing then:
// such a prefix is good for timing alone.
struct Repeated {
  std::string prefix;
  std::unique_ptr<decoder::LocalAttention> attention;  // the same rows in memory
};
Result<Repeated> PutRepeated(Store& store, const std::string& name,
                             std::span<const uint32_t> tokens, const Prefilled& prompt,
                             uint32_t n_tokens);

}  // namespace prefixd::bench
