// Spreads a step's budget over heads: what a further token gains differs from head to head, and was
// measured (runtime/ingest/choice.h). In total no more is read than with equal shares.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace prefixd {

// What one head loses by tokens that it may read beside its anchors, summary included.
struct LossCurve {
  struct Point {
    double tokens = 0;  // > 0
    double loss = 0;    // >= 0, of the same unit for all heads
  };
  std::vector<Point> points;  // ascending by tokens; empty: not known
  uint32_t equal = 0;         // tokens of an equal share
};

// A head's share is from a quarter of the equal one to four times as much, and leaves what was
// measured only where the equal share lies outside.
inline constexpr uint32_t kMostSpread = 4;

// Returns the tokens of each head: their sum is at most that of the equal shares. Heads that
// nothing is known of keep their share. Between points the loss is a power of the tokens; tokens go
// where they take most of it away, by the convex hull of each curve, so that no head is starved for
// a hollow in its curve. Deterministic.
std::vector<uint32_t> SpreadTokens(std::span<const LossCurve> heads);

}  // namespace prefixd
