// Loads a model's weights and converts them to float32 once.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "decoder/checkpoint/config.h"
#include "prefixd/result.h"

namespace prefixd::decoder {

// A matrix computes y = W x. It is row-major [rows][cols] = [out][in], as in the checkpoint.
struct Matrix {
  uint32_t rows = 0, cols = 0;
  std::vector<float> data;
};

struct LayerWeights {
  std::vector<float> attention_norm, mlp_norm;  // [hidden]
  Matrix q, k, v, o;                            // q: [Hq * dh][hidden], o: [hidden][Hq * dh]
  std::vector<float> q_norm, k_norm;            // [head_dim]; empty without QK-norm
  Matrix gate, up, down;                        // [ffn][hidden], [ffn][hidden], [hidden][ffn]
};

struct Weights {
  Matrix embedding;  // [vocab][hidden]
  std::vector<LayerWeights> layers;
  std::vector<float> final_norm;  // [hidden]
  Matrix lm_head;                 // [vocab][hidden]; empty when tied to the embedding

  const Matrix& output() const { return lm_head.rows == 0 ? embedding : lm_head; }
};

// Reads the checkpoint in `directory`. Errors: kNotFound, kIo, kCorrupt; kInvalidArgument for a
// tensor that is missing or has another shape than `config` says (the message names file and
// tensor).
Result<Weights> LoadWeights(const std::filesystem::path& directory, const ModelConfig& config);

}  // namespace prefixd::decoder
