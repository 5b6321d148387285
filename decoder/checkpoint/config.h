// Reads the config.json of a Hugging Face model of the Llama or Qwen3 family.
//
// A setting that changes the numbers and is not implemented is refused by name: another model_type,
// RoPE scaling other than "linear" or "llama3", sliding windows, biases, activations other than
// SiLU, quantised weights. RoPE whose frequencies depend on the current length (dynamic, longrope)
// cannot be stored at all (docs/mathematics.md).
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"

namespace prefixd::decoder {

enum class Family : uint8_t { kLlama, kQwen3 };
enum class RopeType : uint8_t { kDefault, kLinear, kLlama3 };
std::string_view RopeTypeName(RopeType type);  // "default", "linear", "llama3"

struct RopeConfig {
  RopeType type = RopeType::kDefault;
  double theta = 10000;
  double factor = 1;                                 // kLinear, kLlama3
  double low_freq_factor = 1, high_freq_factor = 4;  // kLlama3
  uint32_t original_max_positions = 0;               // kLlama3
};

struct ModelConfig {
  Family family = Family::kLlama;
  uint32_t vocab_size = 0, hidden = 0, ffn = 0;
  uint32_t n_layers = 0, n_q_heads = 0, n_kv_heads = 0, head_dim = 0;
  float norm_eps = 1e-6f;
  RopeConfig rope;
  uint32_t max_positions = 0;
  bool tied_embeddings = false;
  bool qk_norm = false;        // RMSNorm of every query and key head before RoPE (Qwen3)
  DType dtype = DType::kBf16;  // the checkpoint's; a natural choice for the KV cache
  std::vector<uint32_t> eos;   // ids that end a text; may be empty
  std::optional<uint32_t> bos;
};

// `label` opens every message. A missing, impossible or unsupported setting is kInvalidArgument.
Result<ModelConfig> ParseConfig(std::string_view json, std::string_view label);
// Reads `directory`/config.json.
Result<ModelConfig> LoadConfig(const std::filesystem::path& directory);

// Returns the shapes of the model's KV cache when it is kept in `dtype`.
KvGeometry GeometryOf(const ModelConfig& config, DType dtype);

}  // namespace prefixd::decoder
