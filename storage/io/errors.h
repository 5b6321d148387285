// Turns operating-system errors into values and writes the few log lines of a store.
#pragma once

#include <string>
#include <string_view>

#include "prefixd/result.h"

namespace prefixd::storage {

// `error` is an errno value. ENOSPC, EDQUOT and ENOMEM become kResourceExhausted, everything else
// kIo.
Error ErrnoError(int error, std::string what);

// These log to the logger named "prefixd" where the program has made one (spdlog), else warnings
// alone to standard error.
void LogInfo(std::string_view message);
void LogWarning(std::string_view message);

}  // namespace prefixd::storage
