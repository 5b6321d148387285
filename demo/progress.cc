#include "demo/progress.h"

#include <unistd.h>

#include <cstdio>
#include <utility>

namespace prefixd::demo {

ProgressLine::ProgressLine(std::string title)
    : title_(std::move(title)), terminal_(isatty(STDERR_FILENO) != 0) {}

ProgressLine::~ProgressLine() {
  if (terminal_ && shown_per_cent_ >= 0) std::fprintf(stderr, "\r\033[K");
}

void ProgressLine::Update(uint64_t done, uint64_t total, std::string_view unit) {
  const int per_cent = total == 0 ? 100 : static_cast<int>(100 * done / total);
  const auto now = std::chrono::steady_clock::now();
  // On a terminal the line is redrawn. Elsewhere long work prints a line every ten seconds, short
  // work none.
  if (last_ == std::chrono::steady_clock::time_point{}) last_ = now;
  const auto pause = std::chrono::milliseconds(terminal_ ? 100 : 10000);
  if (per_cent == shown_per_cent_ || now - last_ < pause) return;
  last_ = now;
  shown_per_cent_ = per_cent;
  std::fprintf(
      stderr,
      terminal_ ? "\r\033[K   %s: %d%% (%llu of %llu %.*s)" : "   %s: %d%% (%llu of %llu %.*s)\n",
      title_.c_str(), per_cent, static_cast<unsigned long long>(done),
      static_cast<unsigned long long>(total), static_cast<int>(unit.size()), unit.data());
}

}  // namespace prefixd::demo
