// Describes a model by what decides the cost of its prompts: the shape of its KV cache and the
// arithmetic of its prefill.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"

namespace prefixd::bench {

struct ModelShape {
  std::string name;
  uint32_t n_layers = 0, hidden = 0, ffn = 0;
  uint32_t n_q_heads = 0, n_kv_heads = 0, head_dim = 0;
  DType dtype = DType::kBf16;  // of the KV cache
  // What of the model is counted otherwise than it is; for whoever reads the figures.
  std::vector<std::string> notes;

  // The first `layers` layers as a store sees them; scores are scaled by 1/sqrt(head_dim).
  KvGeometry Geometry(uint32_t layers) const;
  KvGeometry Geometry() const { return Geometry(n_layers); }
  uint64_t token_bytes() const { return Geometry().token_bytes(); }
  // Floating-point operations of prefilling tokens [0, n): matrix products with the weights of all
  // layers (2 for each weight and token), and causal attention (4 for each query head, dimension
  // and pair). Embedding and output head are left out.
  double PrefillFlops(uint64_t n) const { return PrefillFlops(double(n), double(n) * double(n)); }
  // Of many prompts, by the sum of their tokens and the sum of these squared.
  double PrefillFlops(double tokens, double squares) const;
};

// SmolLM2-135M, Llama-3.2-1B, Llama-3.1-8B, Llama-3.1-70B, Qwen3-8B.
const std::vector<ModelShape>& KnownModels();

// Takes one of their names (in any case), or the path of a checkpoint's config.json or of the
// folder with it. kNotFound: neither; kInvalidArgument names the file and the setting that is
// missing, impossible, or means layers whose cache is no keys and values of tokens (compressed, as
// in MLA, or recurrent). Only shapes are read, so every other family with rotary attention will do.
// Layers with a sliding window are counted as full, with a note. Of a mixture of experts `ffn` is
// the width of those that a token goes through.
Result<ModelShape> ModelShapeOf(std::string_view name_or_path);
// `label` opens every message.
Result<ModelShape> ParseModelShape(std::string_view json, const std::string& label);

}  // namespace prefixd::bench
