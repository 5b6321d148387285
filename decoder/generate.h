// Decoding and scoring on top of Model::Forward.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "decoder/attention_backend.h"
#include "decoder/model.h"
#include "prefixd/result.h"

namespace prefixd::decoder {

// Index of the largest logit; the first of equals.
uint32_t Argmax(std::span<const float> logits);
// -log softmax(logits)[token], natural logarithm, in float64.
double NegativeLogLikelihood(std::span<const float> logits, uint32_t token);

struct GreedyOptions {
  uint32_t max_tokens = 64;
  std::vector<uint32_t> stop;  // ends the text and is not returned; ModelConfig::eos usually
  // Called with each token as it is chosen; false ends the text after it.
  std::function<bool(uint32_t token)> on_token;
};

// Continues greedily. `logits` are those of the last token that `attention` holds, and `position`
// is the first free one. The last token returned is not run through the model.
Result<std::vector<uint32_t>> GreedyDecode(const Model& model, AttentionBackend& attention,
                                           std::span<const float> logits, uint32_t position,
                                           const GreedyOptions& options);

// Teacher-forced: for each token of `continuation` its negative log-likelihood given all before
// it. `logits` and `position` as above; `block` tokens go through the model together (1: as in
// decoding). The last token is not run through the model.
Result<std::vector<double>> ContinuationNll(const Model& model, AttentionBackend& attention,
                                            std::span<const float> logits, uint32_t position,
                                            std::span<const uint32_t> continuation,
                                            uint32_t block = 64);

}  // namespace prefixd::decoder
