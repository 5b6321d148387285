// Shows progress on stderr in one line: redrawn on a terminal, a few plain lines elsewhere.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace prefixd::demo {

inline double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

class ProgressLine {
 public:
  explicit ProgressLine(std::string title);
  ~ProgressLine();  // ends the line
  ProgressLine(const ProgressLine&) = delete;
  ProgressLine& operator=(const ProgressLine&) = delete;

  void Update(uint64_t done, uint64_t total, std::string_view unit);

 private:
  std::string title_;
  bool terminal_;
  int shown_per_cent_ = -1;
  std::chrono::steady_clock::time_point last_{};
};

}  // namespace prefixd::demo
