// How harnesses say where something went wrong.
#pragma once

#include <filesystem>
#include <string>

#include "tests/reliability/cycles.h"

namespace prefixd::storage::reliability {

// "harness: what". The cycle is named by the journal (Journal::SetContext).
std::string Where(const std::string& harness, const std::string& what);
// The last lines of a file, for a message; empty if there are none.
std::string Tail(const std::filesystem::path& file);

// CheckStore in a child; all that it finds goes to truth and report.
void CheckInChild(const std::string& harness, const std::filesystem::path& dir, Truth& truth,
                  Journal& journal, Journal& report, const std::filesystem::path& errors);

}  // namespace prefixd::storage::reliability
