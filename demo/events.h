// Writes what a command does as lines of JSON on standard output; demo/story/*.py shows them as
// text.
#pragma once

#include <chrono>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace prefixd::demo {

inline double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Writes one line and flushes it, so that tokens show as they come.
void Emit(const nlohmann::json& event);

// Emits {"event": "progress", ...}, at most ten times a second.
class Progress {
 public:
  explicit Progress(std::string what) : what_(std::move(what)) {}
  void Update(uint64_t done, uint64_t total, std::string_view unit);

 private:
  std::string what_;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace prefixd::demo
