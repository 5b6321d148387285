// Second half of the demo: resume, decode under budgets, report; and the same reads cold.
#pragma once

#include <filesystem>
#include <string>

#include "prefixd/result.h"

namespace prefixd::demo {

struct DecodeOptions {
  std::string address;  // of the daemon
  std::filesystem::path state_file, json_file;
};

Status RunDecode(const DecodeOptions& options);

// The same rows against a daemon without host tier: what a step reads when nothing is in memory.
// Adds cold_bytes_per_step and cold_ms_per_token to the rows of the report at json_file.
Status RunCold(const DecodeOptions& options);

}  // namespace prefixd::demo
