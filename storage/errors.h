// Operating-system errors as values, and the room's few log lines.
#pragma once

#include <string>
#include <string_view>

#include "attention/result.h"

namespace prefixd::storage {

// `error` is an errno value. ENOSPC and EDQUOT become kResourceExhausted, everything else kIo.
Error ErrnoError(int error, std::string what);

void LogInfo(std::string_view message);
void LogWarning(std::string_view message);

}  // namespace prefixd::storage
