// Decodes and scores texts on top of Model::Forward.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "decoder/attention/attention_backend.h"
#include "decoder/model/model.h"
#include "prefixd/result.h"

namespace prefixd::decoder {

// Returns the index of the largest logit; the first one among equals.
uint32_t Argmax(std::span<const float> logits);
// Returns -log softmax(logits)[token], natural logarithm, in float64.
double NegativeLogLikelihood(std::span<const float> logits, uint32_t token);

struct GreedyOptions {
  uint32_t max_tokens = 64;
  std::vector<uint32_t> stop;  // ends the text and is not returned; ModelConfig::eos usually
  // Called with each token as it is chosen; false ends the text after it.
  std::function<bool(uint32_t token)> on_token;
};

// Continues greedily. `logits` belong to the last token that `attention` holds, and `position` is
// the first free one. The model does not run the last token that is returned.
Result<std::vector<uint32_t>> GreedyDecode(const Model& model, AttentionBackend& attention,
                                           std::span<const float> logits, uint32_t position,
                                           const GreedyOptions& options);

// Returns the negative log-likelihood of each token of `continuation`, given all tokens before it
// (teacher forcing). `logits` and `position` are as above. `block` tokens go through the model
// together; 1 is as in decoding. The model does not run the last token.
Result<std::vector<double>> ContinuationNll(const Model& model, AttentionBackend& attention,
                                            std::span<const float> logits, uint32_t position,
                                            std::span<const uint32_t> continuation,
                                            uint32_t block = 64);

}  // namespace prefixd::decoder
