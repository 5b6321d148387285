// Says which files the catalog of a snapshot names and its directory lacks, for a backup: of those
// it keeps the copies that it has.
//
// Thread-safety: free functions, any thread.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "prefixd/result.h"

namespace prefixd::storage {

// Names as below the store's directory: "segments/....seg". Written once, before anybody reads.
Status WriteMissingFiles(const std::filesystem::path& snapshot,
                         const std::vector<std::string>& names);
// None where the store lacked nothing.
Result<std::vector<std::string>> ReadMissingFiles(const std::filesystem::path& snapshot);

}  // namespace prefixd::storage
