#include "decoder/checkpoint/weights.h"

#include <array>
#include <string>

#include "decoder/checkpoint/checkpoint.h"

namespace prefixd::decoder {
namespace {

Result<std::vector<float>> ReadVector(const Checkpoint& checkpoint, const std::string& name,
                                      uint32_t size) {
  const std::array<uint64_t, 1> shape = {size};
  return checkpoint.ReadFloats(name, shape);
}

Result<Matrix> ReadMatrix(const Checkpoint& checkpoint, const std::string& name, uint32_t rows,
                          uint32_t cols) {
  const std::array<uint64_t, 2> shape = {rows, cols};
  PREFIXD_ASSIGN(std::vector<float> data, checkpoint.ReadFloats(name, shape));
  return Matrix{rows, cols, std::move(data)};
}

Result<LayerWeights> ReadLayer(const Checkpoint& file, const ModelConfig& config,
                               const std::string& name) {
  const uint32_t hidden = config.hidden, ffn = config.ffn, dh = config.head_dim;
  const uint32_t q_width = config.n_q_heads * dh, kv_width = config.n_kv_heads * dh;
  const std::string attention = name + "self_attn.", mlp = name + "mlp.";
  LayerWeights layer;
  PREFIXD_ASSIGN(layer.attention_norm, ReadVector(file, name + "input_layernorm.weight", hidden));
  PREFIXD_ASSIGN(layer.mlp_norm,
                 ReadVector(file, name + "post_attention_layernorm.weight", hidden));
  PREFIXD_ASSIGN(layer.q, ReadMatrix(file, attention + "q_proj.weight", q_width, hidden));
  PREFIXD_ASSIGN(layer.k, ReadMatrix(file, attention + "k_proj.weight", kv_width, hidden));
  PREFIXD_ASSIGN(layer.v, ReadMatrix(file, attention + "v_proj.weight", kv_width, hidden));
  PREFIXD_ASSIGN(layer.o, ReadMatrix(file, attention + "o_proj.weight", hidden, q_width));
  if (config.qk_norm) {
    PREFIXD_ASSIGN(layer.q_norm, ReadVector(file, attention + "q_norm.weight", dh));
    PREFIXD_ASSIGN(layer.k_norm, ReadVector(file, attention + "k_norm.weight", dh));
  }
  PREFIXD_ASSIGN(layer.gate, ReadMatrix(file, mlp + "gate_proj.weight", ffn, hidden));
  PREFIXD_ASSIGN(layer.up, ReadMatrix(file, mlp + "up_proj.weight", ffn, hidden));
  PREFIXD_ASSIGN(layer.down, ReadMatrix(file, mlp + "down_proj.weight", hidden, ffn));
  return layer;
}

}  // namespace

Result<Weights> LoadWeights(const std::filesystem::path& directory, const ModelConfig& config) {
  PREFIXD_ASSIGN(const Checkpoint file, Checkpoint::Open(directory));
  Weights weights;
  PREFIXD_ASSIGN(weights.embedding,
                 ReadMatrix(file, "model.embed_tokens.weight", config.vocab_size, config.hidden));
  for (uint32_t l = 0; l < config.n_layers; ++l) {
    const std::string name = "model.layers." + std::to_string(l) + ".";
    PREFIXD_ASSIGN(LayerWeights layer, ReadLayer(file, config, name));
    weights.layers.push_back(std::move(layer));
  }
  PREFIXD_ASSIGN(weights.final_norm, ReadVector(file, "model.norm.weight", config.hidden));
  if (!config.tied_embeddings) {
    PREFIXD_ASSIGN(weights.lm_head,
                   ReadMatrix(file, "lm_head.weight", config.vocab_size, config.hidden));
  }
  return weights;
}

}  // namespace prefixd::decoder
