// Sets up the daemon's log (spdlog), once at start.
#pragma once

#include <string>

#include "prefixd/result.h"

namespace prefixd::daemon {

// An empty `file` means standard error. format: "text", or "json": an object a line, with the
// members time, level, message and those of LogEvent. kIo when the file cannot be opened.
Status SetUpLogging(const std::string& level, const std::string& file,
                    const std::string& format = "text");

}  // namespace prefixd::daemon
