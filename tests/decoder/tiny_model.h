// A random checkpoint of a few thousand parameters, to be written whole or damaged.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "decoder/model.h"

namespace prefixd::decoder::testing {

struct TinyModel {
  nlohmann::json config;
  // name -> shape and values (written as float32)
  std::map<std::string, std::pair<std::vector<uint64_t>, std::vector<float>>> tensors;

  // family: "llama" (tied embeddings) or "qwen3" (untied). 3 layers, 4 query and 2 KV heads of 16,
  // width 48, byte-level vocabulary of 264.
  static TinyModel Random(const std::string& family, uint64_t seed);

  // config.json and model.safetensors, or with n_shards > 1 an index and that many shards.
  void Write(const std::filesystem::path& directory, int n_shards = 1) const;
  // Through a temporary directory.
  Model Load(const ModelOptions& options = {}) const;
};

}  // namespace prefixd::decoder::testing
