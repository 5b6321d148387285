// The time of day as the catalog writes it. Any thread.
#pragma once

#include <chrono>
#include <cstdint>

namespace prefixd::storage {

inline int64_t NowUnixMs() {
  using std::chrono::duration_cast, std::chrono::milliseconds, std::chrono::system_clock;
  return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

// A time that lies further ahead was written by a clock that was wrong, as one is before NTP.
inline constexpr int64_t kClockSlackMs = 3600'000;
// Stands for such a time: long ago, so that what goes by it is done again.
inline constexpr int64_t kUnknownTimeMs = 1;

}  // namespace prefixd::storage
