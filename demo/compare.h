// Compares ways of reading a stored document with reading all of it: what the model predicts, what
// it writes, and the attention output of each head. Everything that reads a document shares its one
// prefill.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "decoder/attention/spliced_attention.h"
#include "decoder/model/model.h"
#include "prefixd/compress.h"
#include "prefixd/ingest.h"
#include "prefixd/policy.h"
#include "prefixd/result.h"

namespace prefixd::demo {

// Tokens that follow the document. `exact` attend to all of it; `read` come after them and read it
// in the way that is measured, one by one. Exactly one of `targets` and `generate` is given.
struct Passage {
  std::vector<uint32_t> exact, read;
  std::vector<uint32_t> targets;  // the token after each of `read`, given by the text
  // The model writes up to so many tokens after the single one of `read`, until one of `stop`.
  uint32_t generate = 0;
  std::vector<uint32_t> stop;
};

struct NamedPolicy {
  std::string name;
  StepPolicy policy;
  std::optional<CompressSpec> compress;  // the document is compressed like this first
};

// What a way of reading makes of one token, against reading everything.
struct TokenDifference {
  double kl = 0;      // KL(full || this), nats
  double nll = 0;     // -log of this one's probability of the target, nats
  bool same = false;  // whether both have the same most likely next token
};
// Computes in float64 from two rows of logits.
TokenDifference CompareLogits(std::span<const float> full, std::span<const float> other,
                              uint32_t target);

struct PassageResult {
  std::vector<TokenDifference> tokens;
  std::vector<uint32_t> text;  // what was generated, without the token that stopped it
  std::vector<float> logits;   // [tokens][vocab], if they were asked for
};

struct ReadingResult {
  std::optional<std::string> infeasible;  // why the budget cannot be kept; all else is empty then
  std::vector<PassageResult> passages;
  // Mean over the recorded queries, [n_layers * n_q_heads]: the relative l1 error of the output
  // over the document, and log-sum-exp above that of reading everything.
  std::vector<double> errors, shifts;
  double tokens_per_step = 0;  // token-equivalents per KV head, as the ledger counts them
};

class Comparison {
 public:
  // `session` reads the document, and each of `passages` follows it. The queries of `recorded`
  // tokens of the first one, if it is forced, are kept for errors by head. `model` and `passages`
  // must outlive it. One thread at a time.
  Comparison(const decoder::Model& model, std::shared_ptr<Session> session,
             std::span<const Passage> passages, uint32_t recorded, bool keep_logits);

  // Reads everything, which all else is compared with.
  Result<ReadingResult> Full();
  // Full() comes first.
  Result<ReadingResult> Read(const StepPolicy& policy);
  // From now on reads the document through another session: of what compressing left of it.
  void ReadThrough(std::shared_ptr<Session> session);
  // Returns the normalised entropy of each query head over the middle, mean over the recorded
  // queries: [n_layers * n_q_heads]; empty if none are.
  Result<std::vector<double>> Entropy();

 private:
  // A passage whose `exact` tokens have run, and what full attention predicts in it.
  struct Begun {
    std::unique_ptr<decoder::SplicedAttention> attention;
    std::vector<uint32_t> read, targets;
    std::vector<float> logits;  // [read][vocab]
    std::vector<uint32_t> text;
  };

  Result<Begun> Begin(const Passage& passage, bool record);
  // Lets the model write with everything read; its choices become the tokens to read.
  Status Write(const Passage& passage, uint32_t position, Begun& begun);
  Result<PassageResult> ReadPassage(const Passage& passage, Begun& begun);
  // Goes on from the first token that is not what full attention wrote.
  Result<std::vector<uint32_t>> OwnText(const Passage& passage, Begun& begun,
                                        std::span<const float> logits);
  PassageResult Against(const Begun& begun, std::vector<float> logits) const;
  Status MeasureHeads(ReadingResult& result);
  std::span<const float> Row(std::span<const float> logits, size_t i) const {
    return logits.subspan(i * model_.config().vocab_size, model_.config().vocab_size);
  }

  const decoder::Model& model_;
  std::shared_ptr<Session> session_;
  std::span<const Passage> passages_;
  const uint32_t recorded_;
  const bool keep_logits_;
  std::vector<Begun> begun_;
  std::vector<std::vector<float>> queries_;  // [n_layers] of [recorded][n_q_heads * key_dim]
  std::vector<std::vector<float>> outputs_, norms_;  // likewise, with everything read
};

}  // namespace prefixd::demo
