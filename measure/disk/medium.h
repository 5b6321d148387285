// Tells whether files of a directory lie on a disk, or are read from memory whatever is measured.
//
// Thread-safety: free functions.
#pragma once

#include <filesystem>
#include <string>

namespace prefixd::bench {

struct Medium {
  bool disk = true;
  std::string place = "the SSD";  // where rows in files lie, behind "rows on" or "from"
  std::string sentence;           // for verdicts, where it is no disk
  std::string rows() const { return disk ? "rows on the SSD" : "rows in a file, page cache"; }
};

// Files of tmpfs and ramfs, and of file systems that refuse O_DIRECT, come from the page cache.
Medium MediumOf(const std::filesystem::path& dir);

}  // namespace prefixd::bench
