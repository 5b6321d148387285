// Holds what a command of prefixd-demo is asked to do. The text is demo/story/*.py's: here,
// prompts, questions and answers are token ids.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "prefixd/result.h"

namespace prefixd::demo {

struct Question {
  std::vector<uint32_t> tokens;  // follow the prompt
  std::vector<uint32_t> alone;   // the same question without the document; empty: not asked
};

// The largest logits of one position, by token.
using TopLogits = std::vector<std::pair<uint32_t, float>>;

// Holds what the decoder answered without prefixd; `logits` of each token that it chose.
struct OwnAnswer {
  std::vector<uint32_t> tokens;
  std::vector<TopLogits> logits;
};

// A way of reading the prompt: a name of Methods(), and a budget unless everything is read.
struct Reading {
  std::string method;
  std::optional<double> budget;
};

struct Request {
  std::string model_dir, label;
  std::string model, prefix;     // as `prefill` reported them
  std::vector<uint32_t> prompt;  // with whatever stands before the document
  std::vector<uint32_t> continuation;
  std::vector<Question> questions;
  uint32_t answer_tokens = 24;
  std::optional<OwnAnswer> own;   // to the first question
  std::vector<Reading> readings;  // rows of the table
  std::vector<Reading> asked;     // columns of answers
  uint32_t recorded_tokens = 48;  // of the continuation, to measure errors of outputs
  uint32_t cold_tokens = 32;
};

// kInvalidArgument: `text` is not a request in JSON; the message names what is wrong.
Result<Request> ParseRequest(const std::string& text);

}  // namespace prefixd::demo
