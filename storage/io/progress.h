// How long work tells how far it has come.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace prefixd::storage {

// (done, total, unit) for long work; called from the working thread, must be quick. Returning
// false asks to stop (kCancelled).
using Progress = std::function<bool(uint64_t done, uint64_t total, std::string_view unit)>;

}  // namespace prefixd::storage
