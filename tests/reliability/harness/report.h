// Formats harnesses' messages about what went wrong where.
#pragma once

#include <filesystem>
#include <string>

#include "tests/reliability/harness/cycles.h"
#include "tests/reliability/workload/persister.h"

namespace prefixd::storage::reliability {

// Returns "harness: what". The journal names the cycle (Journal::SetContext).
std::string Where(const std::string& harness, const std::string& what);
// Returns the last lines of a file, for a message; empty if there are none.
std::string Tail(const std::filesystem::path& file);

// Runs CheckStore in a child; its findings go to truth and report.
void CheckInChild(const std::string& harness, const std::filesystem::path& dir, Truth& truth,
                  Journal& journal, Journal& report, const std::filesystem::path& errors);

// Runs Persister::Check in a child; its findings go to progress and report.
void CheckSessionsInChild(const std::string& harness, const std::filesystem::path& dir,
                          const testing::SyntheticPrompt& all, SharedProgress& progress,
                          Journal& report, const std::filesystem::path& errors);

}  // namespace prefixd::storage::reliability
