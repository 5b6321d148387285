// Runs the second half of the demo: resumes, decodes under budgets, reports, and reads the same
// cold.
#pragma once

#include <filesystem>
#include <string>

#include "prefixd/result.h"

namespace prefixd::demo {

struct DecodeOptions {
  std::string address;  // the daemon's address
  std::filesystem::path state_file, json_file;
};

Status RunDecode(const DecodeOptions& options);

// Measures the same rows against a daemon without host tier, where a step finds nothing in memory.
// Adds cold_bytes_per_step and cold_ms_per_token to the rows of the report at json_file.
Status RunCold(const DecodeOptions& options);

}  // namespace prefixd::demo
