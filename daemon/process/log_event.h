// Logs what has parts: in a text log behind the sentence as name=value, in a JSON log as members.
//
// Thread-safety: may be called concurrently.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string_view>

namespace prefixd::daemon {

enum class LogLevel { kDebug, kInfo, kWarn, kError };

// fields: a flat object. Nothing is written when the level is not logged.
void LogEvent(LogLevel level, std::string_view what, const nlohmann::json& fields);
// Whether a line of this level would be written.
bool Logs(LogLevel level);

}  // namespace prefixd::daemon
