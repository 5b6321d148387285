// Runs a decoder-only transformer of the Llama or Qwen3 family on the CPU, in float32.
//
//   auto model = Model::Load("models/prefixd-tiny", {});
//   LocalAttention attention(model->Geometry(DType::kBf16));
//   model->Forward(prompt, 0, attention, 1, logits);       // prefill
//   model->Forward({&token, 1}, position, attention, 1, logits);  // one step
//
// Thread-safety: any number of threads may call const methods, each with its own backend.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <span>

#include "decoder/attention/attention_backend.h"
#include "decoder/checkpoint/config.h"
#include "decoder/checkpoint/weights.h"
#include "decoder/model/rope.h"
#include "prefixd/kv_shape.h"
#include "prefixd/result.h"

namespace prefixd::decoder {

struct ModelOptions {
  uint32_t threads = 0;         // for loops that this thread starts; 0: one per core
  uint32_t chunk_tokens = 512;  // tokens per pass through the layers in a prefill
};

// Called after each chunk of a prefill; false stops it (kCancelled).
using PrefillProgress = std::function<bool(uint32_t done, uint32_t total)>;

class Model {
 public:
  // Reads config.json and the safetensors of a checkpoint directory.
  static Result<Model> Load(const std::filesystem::path& directory, const ModelOptions& options);
  // Builds the model from its parts; options out of range are kInvalidArgument.
  static Result<Model> Create(ModelConfig config, Weights weights, const ModelOptions& options);

  const ModelConfig& config() const { return config_; }
  KvGeometry Geometry(DType kv_dtype) const { return GeometryOf(config_, kv_dtype); }

  // Runs `tokens` at positions first, first + 1, ... with attention by `attention`. `logits`
  // [n_logits][vocab_size] receives the logits of the last n_logits tokens (0 <= n_logits <=
  // tokens). kInvalidArgument: no tokens, a token outside the vocabulary, a position at or beyond
  // max_positions, a wrong buffer size. Errors of the backend are passed on.
  Status Forward(std::span<const uint32_t> tokens, uint32_t first, AttentionBackend& attention,
                 uint32_t n_logits, std::span<float> logits,
                 const PrefillProgress& progress = nullptr) const;

 private:
  Model(ModelConfig config, Weights weights, const ModelOptions& options)
      : config_(std::move(config)),
        weights_(std::move(weights)),
        options_(options),
        rope_(config_.rope, config_.head_dim) {}

  // Runs one chunk through all layers and returns the residual stream x [n][hidden] before the
  // final norm.
  Result<std::vector<float>> RunLayers(std::span<const uint32_t> tokens, uint32_t first,
                                       AttentionBackend& attention) const;
  Status AttentionBlock(uint32_t layer, uint32_t first, const RopeTable& rope,
                        AttentionBackend& attention, std::span<float> x) const;
  void MlpBlock(uint32_t layer, std::span<float> x) const;

  ModelConfig config_;
  Weights weights_;
  ModelOptions options_;
  Rope rope_;
};

}  // namespace prefixd::decoder
