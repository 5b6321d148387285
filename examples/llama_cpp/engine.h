// One sequence of a llama.cpp model: tokens in, the next one out, and its state as rows.
//
// Thread-safety: one thread at a time.
#pragma once

#include <llama.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "examples/llama_cpp/sequence_state.h"
#include "prefixd/client.h"

namespace llama_example {

struct EngineOptions {
  std::string model;  // a GGUF file
  uint32_t context = 8192;
  int threads = 2;
};

class Engine {
 public:
  // Ends the program with a sentence where the model cannot be read, or keeps more than the keys
  // and values of every token (sliding windows, recurrent layers, encoders).
  explicit Engine(const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // What prefixd must know of the model. Its identity is that of this file under llama.cpp: these
  // keys are permuted, and its tokens are others, than a Hugging Face model's of the same weights.
  prefixd::ModelSpec Describe();

  std::vector<llama_token> Tokenize(const std::string& text, bool first) const;
  std::string Text(llama_token token) const;
  bool Ends(llama_token token) const;

  uint32_t n_tokens() const { return n_tokens_; }
  // Computes tokens behind those that the sequence has.
  void Decode(std::span<const llama_token> tokens);
  // The logits behind the last token that was decoded.
  std::span<const float> logits() const;
  // Takes back all tokens from `n` on.
  void Truncate(uint32_t n);

  SequenceState State() const;
  // Replaces the sequence by `state`.
  void Load(const SequenceState& state);
  // A state of `n` tokens to be filled with rows; needs a sequence that was decoded once.
  SequenceState Room(uint32_t n);

 private:
  const SequenceState& Layout();

  EngineOptions options_;
  llama_model* model_ = nullptr;
  llama_context* context_ = nullptr;
  const llama_vocab* vocab_ = nullptr;
  uint32_t n_tokens_ = 0;
  std::unique_ptr<SequenceState> layout_;
};

// Prints a sentence and ends the program.
[[noreturn]] void Fail(const std::string& sentence);

}  // namespace llama_example
