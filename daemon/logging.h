// The daemon's log (spdlog), set up once at start.
#pragma once

#include <string>

#include "prefixd/result.h"

namespace prefixd::daemon {

// `file` empty: standard error. kIo when the file cannot be opened.
Status SetUpLogging(const std::string& level, const std::string& file);

}  // namespace prefixd::daemon
