// How harnesses say where something went wrong.
#pragma once

#include <filesystem>
#include <string>

#include "tests/reliability/cycles.h"

namespace prefixd::storage::reliability {

// "disk --seed-of-cycle 123: what".
std::string Where(const std::string& harness, uint64_t seed, const std::string& what);
// The last lines of a file, for a message; empty if there are none.
std::string Tail(const std::filesystem::path& file);

// CheckStore in a child; all that it finds goes to truth and report.
void CheckInChild(const std::string& harness, uint64_t seed, const std::filesystem::path& dir,
                  Truth& truth, Journal& journal, Journal& report,
                  const std::filesystem::path& errors);

}  // namespace prefixd::storage::reliability
