// Small JSON files of a checkpoint. Included by .cc files only: it shows nlohmann/json.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "prefixd/result.h"

namespace prefixd::decoder {

// The text of a file of at most 64 MB. kNotFound, kIo, kInvalidArgument; names the file.
Result<std::string> ReadTextFile(const std::filesystem::path& path);
// A JSON object; `label` opens the message.
Result<nlohmann::json> ParseJsonObject(std::string_view text, std::string_view label);

}  // namespace prefixd::decoder
