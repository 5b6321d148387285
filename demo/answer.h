// Answers one question greedily, and emits each token as it is chosen.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "decoder/attention/attention_backend.h"
#include "decoder/model/model.h"
#include "demo/request.h"
#include "prefixd/result.h"

namespace prefixd::demo {

struct Answer {
  std::vector<uint32_t> tokens;
  std::vector<TopLogits> logits;  // for each token, if they are kept
  double seconds = 0;             // from the first token on
};

struct AnswerOptions {
  uint32_t tokens = 24;
  bool keep_logits = false;
  uint32_t question = 0;  // these two are told with each token
  Reading reading;
};

// `logits` are those of the question's last token, `position` is the first free one. The answer
// ends before the model's end of text.
Result<Answer> AnswerQuestion(const decoder::Model& model, decoder::AttentionBackend& attention,
                              std::span<const float> logits, uint32_t position,
                              const AnswerOptions& options);

// Returns the largest difference of logits that both have.
double MaxLogitDifference(const TopLogits& a, const TopLogits& b);

}  // namespace prefixd::demo
