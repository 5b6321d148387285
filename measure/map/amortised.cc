#include "measure/map/amortised.h"

namespace prefixd::bench {

std::optional<double> BreakEvenTokens(const Way& a, const Way& b) {
  const double behind = a.once_ms - b.once_ms, gain = b.token_ms - a.token_ms;
  if (behind <= 0) return 0.0;
  if (gain <= 0) return std::nullopt;
  return behind / gain;
}

}  // namespace prefixd::bench
