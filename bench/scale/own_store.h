// Keeps a benchmark that stays with its store away from the stores of others.
//
// Thread-safety: one process at a time for a directory.
#pragma once

#include <filesystem>
#include <string>

#include "prefixd/result.h"

namespace prefixd::bench {

// Makes `dir`, or takes it where it is empty or an earlier call took it for the same `content` (one
// line that says what the store has). Nothing but an empty folder is written to before that is
// known. kFailedPrecondition, with what to do: it holds anything else, or lies in a store;
// kInvalidArgument: it is no directory that can be made and written to.
Status ClaimStore(const std::filesystem::path& dir, const std::string& content);

}  // namespace prefixd::bench
