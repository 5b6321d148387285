// What scale_bench measures, and with what; shared by its parts.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "prefixd/model.h"
#include "prefixd/result.h"

namespace prefixd::bench {

struct ScaleOptions {
  std::vector<uint32_t> prefixes = {1, 100, 1000, 10000, 100000};
  std::vector<uint32_t> sessions = {1, 10, 100, 1000};
  std::vector<uint32_t> lengths = {1000, 10000, 100000, 1000000};
  uint32_t prefix_tokens = 64, session_tokens = 4096, prompts = 16;
  uint32_t putters = 4, connections = 16, calls = 1000, repeats = 3;
  double block_s = 5, budget = 0.02;
  std::filesystem::path dir;      // of the store of many prefixes, which stays; empty: in scratch
  std::filesystem::path scratch;  // goes at the end
  std::string program;
  std::vector<std::string> daemon;  // further arguments
};

// Each measures at ascending sizes, prints a row for each, and returns a list of objects.
Result<nlohmann::json> MeasurePrefixes(const ScaleOptions& options);
Result<nlohmann::json> MeasureSessions(const ScaleOptions& options);
Result<nlohmann::json> MeasureLengths(const ScaleOptions& options);

// One layer of 8 query and 2 KV heads of 64: 512 bytes a token.
ModelSpec ScaleModel();

}  // namespace prefixd::bench
