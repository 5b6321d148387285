// Decodes over a stored prompt and over the decoder's own cache, in turns, and compares greedy
// texts.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "decoder/attention/attention_backend.h"
#include "decoder/model/model.h"
#include "measure/timing/statistics.h"
#include "prefixd/client.h"

namespace prefixd::bench {

// One way to hold the prompt while tokens are decoded.
struct DecodeSide {
  std::string name;
  decoder::AttentionBackend* attention = nullptr;
  std::function<void()> rewind;             // forgets the tokens after the prompt
  std::function<Ledger()> spent;            // empty where nothing is counted
  std::vector<double> token_ms, inside_ms;  // of each token: in all, and inside attention
  // Means of each round, for ratios between sides.
  std::vector<double> round_ms, round_inside_ms;
  // Milliseconds of a token in which the session searches, reads and computes, summed over threads.
  double select_ms = 0, read_ms = 0, compute_ms = 0;
};

struct DecodeOptions {
  uint32_t position = 0;  // of the first decoded token, for the model
  uint32_t n_tokens = 0;  // of the prompt as it is held: positions are moved by the difference
  uint32_t rounds = 5;
  std::vector<uint32_t> tokens;  // decoded in each round, teacher-forced
};
// All sides decode the same tokens, by turns; a first round does not count.
Status Decode(const decoder::Model& model, const DecodeOptions& options,
              std::span<DecodeSide> sides);

// Ratios a / b of rounds.
Spread Ratio(const std::vector<double>& a, const std::vector<double>& b);

// A greedy text, and how sure the model was.
struct Greedy {
  std::vector<uint32_t> tokens;
  std::vector<std::vector<float>> logits;  // of each token
};
// The prompt's last token runs through `attention`, which holds those before it.
Result<Greedy> GreedyText(const decoder::Model& model, decoder::AttentionBackend& attention,
                          uint32_t last_token, uint32_t position, uint32_t n_tokens);

struct Agreement {
  uint32_t equal = 0, of = 0;  // tokens before the first difference
  // By how much the first text prefers its own token there, in nats by its own logits.
  std::optional<double> margin;
  double max_logit_difference = 0;  // over the equal part
};
Agreement Compare(const Greedy& own, const Greedy& other);

}  // namespace prefixd::bench
