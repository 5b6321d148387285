// The time of day as the catalog writes it. Any thread.
#pragma once

#include <chrono>
#include <cstdint>

namespace prefixd::storage {

inline int64_t NowUnixMs() {
  using std::chrono::duration_cast, std::chrono::milliseconds, std::chrono::system_clock;
  return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

}  // namespace prefixd::storage
