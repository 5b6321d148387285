// Declares how long calls report their progress.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace prefixd {

// Hears how far a long call is, in units of its own ("pages", "tokens", "bytes"); returns false to
// end the call.
using ProgressFn = std::function<bool(uint64_t done, uint64_t total, std::string_view unit)>;

}  // namespace prefixd
