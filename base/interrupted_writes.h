// Remembers which writes of a put ended early, and how far they came: the same write again goes on
// there, so that its caller may simply repeat it.
//
// Thread-safety: that of the put, which one thread uses.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "prefixd/partition.h"

namespace prefixd {

class InterruptedWrites {
 public:
  // Returns the first token that a write of `tokens` still has to write.
  uint32_t Resume(uint32_t layer, TokenRange tokens) const {
    const auto it = Find(layer, tokens);
    return it == writes_.end() ? tokens.begin : it->next;
  }
  // A write of `tokens` ended before `next`.
  void Note(uint32_t layer, TokenRange tokens, uint32_t next) {
    const auto it = Find(layer, tokens);
    if (it != writes_.end()) writes_.erase(it);
    if (next > tokens.begin && next < tokens.end) writes_.push_back({layer, tokens, next});
  }

 private:
  struct Write {
    uint32_t layer;
    TokenRange tokens;
    uint32_t next;
  };
  std::vector<Write>::const_iterator Find(uint32_t layer, TokenRange tokens) const {
    return std::ranges::find_if(
        writes_, [&](const Write& w) { return w.layer == layer && w.tokens == tokens; });
  }
  std::vector<Write> writes_;
};

}  // namespace prefixd
