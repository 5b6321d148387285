// Sets up the daemon's log (spdlog), once at start.
#pragma once

#include <string>

#include "prefixd/result.h"

namespace prefixd::daemon {

// An empty `file` means standard error. kIo when the file cannot be opened.
Status SetUpLogging(const std::string& level, const std::string& file);

}  // namespace prefixd::daemon
