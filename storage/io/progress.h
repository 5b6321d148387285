// Declares how long-running work reports its progress.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace prefixd::storage {

// Long-running work calls it with (done, total, unit) from its own thread; it must be quick.
// Returning false stops the work (kCancelled).
using Progress = std::function<bool(uint64_t done, uint64_t total, std::string_view unit)>;

}  // namespace prefixd::storage
