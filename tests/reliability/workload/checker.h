// Judges a store as it lies on the disk after a crash: opens it and compares it with the truth.
#pragma once

#include <filesystem>

#include "tests/reliability/workload/truth.h"

namespace prefixd::storage::reliability {

// The violation text for this loss.
inline constexpr const char* kCompactedBlobLost = "a blob that came with a compaction is lost";

// Runs in a process of its own. Violations go to the journal, and so do its findings on everything
// that the truth leaves open, so that the store can be used on. With `use`, the store is also
// written to and opened once more.
void CheckStore(const std::filesystem::path& dir, Truth& truth, Journal& journal, bool use);

}  // namespace prefixd::storage::reliability
