// Holds what the prefilling process passes to the decoding one beside the stored prefix: the
// prompt, the questions, its timings, and its own answers, computed without prefixd.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "demo/document.h"
#include "prefixd/result.h"

namespace prefixd::demo {

struct DemoState {
  std::string document, model_dir, model, prefix;
  std::vector<uint32_t> prompt;  // token ids
  std::string continuation;
  std::vector<Fact> facts;
  double cold_prefill_s = 0;  // prompt and first question, until the first answer token
  double put_s = 0, ingest_s = 0;
  uint64_t put_bytes = 0;
  // Computed without prefixd: the answers, and all logits of the first question and its answer.
  std::vector<std::vector<uint32_t>> own_answers;
  std::vector<std::vector<float>> own_logits;
};

inline constexpr uint32_t kAnswerTokens = 5;

Status SaveState(const DemoState& state, const std::filesystem::path& path);
Result<DemoState> LoadState(const std::filesystem::path& path);

}  // namespace prefixd::demo
