// Lets so many lines a minute into the log that peers who are refused in a loop do not fill the
// disk.
//
// Thread-safety: one thread at a time.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace prefixd::daemon {

class LogThrottle {
 public:
  using Clock = std::chrono::steady_clock;

  // What to append to the line that may be written now: "", or how many were left out since the
  // last one. nullopt: leave the line out.
  std::optional<std::string> Line(Clock::time_point now = Clock::now()) {
    constexpr double kBurst = 20, kPerSecond = 0.5;
    const double waited = std::chrono::duration<double>(now - last_).count();
    room_ = std::min(kBurst, room_ + waited * kPerSecond);
    last_ = now;
    if (room_ < 1) {
      ++left_out_;
      return std::nullopt;
    }
    room_ -= 1;
    if (left_out_ == 0) return "";
    return " (" + std::to_string(std::exchange(left_out_, 0)) + " lines like it were left out)";
  }

 private:
  Clock::time_point last_ = Clock::now();
  double room_ = 20;
  uint64_t left_out_ = 0;
};

}  // namespace prefixd::daemon
