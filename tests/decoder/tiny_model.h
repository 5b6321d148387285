// Makes a random checkpoint of a few thousand parameters, which tests write whole or damaged.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "decoder/model/model.h"

namespace prefixd::decoder::testing {

struct TinyModel {
  nlohmann::json config;
  // name -> shape and values (written as float32)
  std::map<std::string, std::pair<std::vector<uint64_t>, std::vector<float>>> tensors;

  // `family` is "llama" (tied embeddings) or "qwen3" (untied). The model has 3 layers, 4 query and
  // 2 KV heads of 16, width 48, and a byte-level vocabulary of 264.
  static TinyModel Random(const std::string& family, uint64_t seed);

  // Writes config.json and model.safetensors, or with n_shards > 1 an index and that many shards.
  void Write(const std::filesystem::path& directory, int n_shards = 1) const;
  // Loads the model through a temporary directory.
  Model Load(const ModelOptions& options = {}) const;
};

}  // namespace prefixd::decoder::testing
