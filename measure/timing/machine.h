// Describes the machine that figures were measured on, for people.
#pragma once

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

namespace prefixd::bench {

// Name and value of each fact: processor, memory, kernel, the disk of `dir` with its file system
// and free space, the load when the run began, date, version, and command without paths of files
// that were named for results.
std::vector<std::pair<std::string, std::string>> MachineFacts(const std::filesystem::path& dir);

// Processes that want a core, over the cores: above a half, other work disturbs the figures.
double LoadPerCore();

}  // namespace prefixd::bench
