// Divides a stored prefix into anchors, mid region and remainder (docs/mathematics.md, eq. [2]).
#pragma once

#include <algorithm>
#include <cstdint>

namespace prefixd {

// Half-open run of token positions.
struct TokenRange {
  uint32_t begin = 0;
  uint32_t end = 0;
  uint32_t size() const { return end - begin; }
  bool contains(uint32_t t) const { return t >= begin && t < end; }
  bool operator==(const TokenRange&) const = default;
};

struct Anchors {
  uint32_t n_sink = 4;
  uint32_t n_tail = 16;
  bool operator==(const Anchors&) const = default;
};

// [0, n) = sinks | mid | tail; short prefixes have an empty mid and sinks first.
struct Partition {
  TokenRange sink, mid, tail;

  static Partition Of(uint32_t n_tokens, Anchors anchors) {
    const uint32_t s = std::min(n_tokens, anchors.n_sink);
    const uint32_t t = std::min(n_tokens - s, anchors.n_tail);
    return {{0, s}, {s, n_tokens - t}, {n_tokens - t, n_tokens}};
  }
  uint32_t anchor_count() const { return sink.size() + tail.size(); }
};

}  // namespace prefixd
