// Compares ways to answer from a long prompt over a whole answer: what is paid once, and what each
// generated token costs.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <optional>
#include <string>

namespace prefixd::bench {

struct Way {
  std::string name;
  double once_ms = 0;   // before the first generated token
  double token_ms = 0;  // attention over the prompt, for each generated token
  double total_ms(double tokens) const { return once_ms + tokens * token_ms; }
};

// Returns how many generated tokens it takes until `a` has cost no more than `b`: 0 when it costs
// no more at the beginning; nothing when it never catches up.
std::optional<double> BreakEvenTokens(const Way& a, const Way& b);

}  // namespace prefixd::bench
