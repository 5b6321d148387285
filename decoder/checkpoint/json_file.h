// Reads small JSON files of a checkpoint. Only .cc files include it, because it includes
// nlohmann/json.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "prefixd/result.h"

namespace prefixd::decoder {

// Returns the text of a file of at most 64 MB. The error (kNotFound, kIo, kInvalidArgument) names
// the file.
Result<std::string> ReadTextFile(const std::filesystem::path& path);
// Parses a JSON object; `label` opens the message of an error.
Result<nlohmann::json> ParseJsonObject(std::string_view text, std::string_view label);

}  // namespace prefixd::decoder
