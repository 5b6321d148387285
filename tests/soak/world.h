// What the soak stores and asks, and the answers that an embedded store gave. Made once, before any
// client is forked; the clients share it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "prefixd/store.h"

namespace prefixd::soak {

struct Prompt {
  size_t model = 0;
  std::vector<uint32_t> tokens;
  std::vector<std::vector<std::byte>> k, v;  // by layer: [n][n_kv_heads][dim]
};

struct Answer {
  std::vector<float> y, lse;
};

struct World {
  static constexpr size_t kQueries = 6;  // of each model and layer

  uint64_t seed = 0;
  std::vector<std::string> tenants;
  std::vector<ModelSpec> models;
  std::vector<Prompt> prompts;  // every tenant stores them all; some begin alike
  std::vector<StepPolicy> policies;
  std::vector<std::vector<std::vector<float>>> queries;  // by model, then layer * kQueries + query
  std::vector<Answer> answers;

  const Answer& AnswerOf(size_t prompt, size_t policy, uint32_t layer, size_t query) const {
    return answers[AnswerIndex(prompt, policy, layer, query)];
  }
  size_t AnswerIndex(size_t prompt, size_t policy, uint32_t layer, size_t query) const {
    return ((prompt * policies.size() + policy) * kMaxLayers + layer) * kQueries + query;
  }
  const ModelSpec& ModelOf(const Prompt& prompt) const { return models[prompt.model]; }

  static constexpr size_t kMaxLayers = 4;
};

// Makes names of tenants, models, prompts and queries; asks a store in `dir`, which is closed
// again, for the answers.
Result<World> MakeWorld(uint64_t seed, uint32_t tenants, const std::filesystem::path& dir);

// Makes a prompt of the model whose first `common` tokens are those of `like`, with the same rows.
Prompt MakePrompt(const ModelSpec& spec, size_t model, uint32_t n, uint64_t seed,
                  const Prompt* like = nullptr, uint32_t common = 0);

// Writes what the put lacks, in runs of `run` tokens.
Status WriteRows(PutStream& put, const ModelSpec& spec, const Prompt& prompt, uint32_t run);

}  // namespace prefixd::soak
