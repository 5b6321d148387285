#include "measure/disk/memory_left.h"

#include <algorithm>
#include <fstream>
#include <string>

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;

// The value behind `name` in a file of names and numbers, or 0.
uint64_t Named(const fs::path& file, const std::string& wanted) {
  std::ifstream in(file);
  std::string name, rest;
  for (uint64_t value = 0; in >> name >> value; std::getline(in, rest)) {
    if (name == wanted) return value;
  }
  return 0;
}

// What a group's limit leaves, its page cache counted as free; UINT64_MAX without a limit.
uint64_t GroupLeaves(const fs::path& group) {
  uint64_t limit = 0, used = 0;
  if (!(std::ifstream(group / "memory.max") >> limit)) return UINT64_MAX;  // "max"
  if (!(std::ifstream(group / "memory.current") >> used)) return UINT64_MAX;
  const uint64_t cache =
      Named(group / "memory.stat", "inactive_file") + Named(group / "memory.stat", "active_file");
  used -= std::min(used, cache);
  return limit - std::min(limit, used);
}

}  // namespace

uint64_t AvailableMemory(const MemoryFiles& files) {
  uint64_t left = Named(files.meminfo, "MemAvailable:") << 10;
  std::ifstream in(files.own_group);
  for (std::string line; std::getline(in, line);) {
    if (!line.starts_with("0::")) continue;
    // Limits of the groups above hold as well.
    fs::path group = files.groups / fs::path(line.substr(3)).relative_path();
    for (; group.native().size() >= files.groups.native().size(); group = group.parent_path()) {
      left = std::min(left, GroupLeaves(group));
    }
  }
  return left;
}

}  // namespace prefixd::bench
