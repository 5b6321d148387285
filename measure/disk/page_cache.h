// Gives up what the page cache holds of files, so that they are read from the disk.
//
// Thread-safety: free functions.
#pragma once

#include <filesystem>

namespace prefixd::bench {

// Takes what the page cache holds of the files below `dir` out of it, written or not: what was not
// is written first. Their names stay cached, and so do pages that a process has mapped.
void DropPageCache(const std::filesystem::path& dir);

}  // namespace prefixd::bench
