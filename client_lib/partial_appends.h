// Remembers how far appends of several messages came that failed: the same append again goes on
// there, so that its caller may simply repeat it. Internal to client_lib.
//
// Thread-safety: none.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "prefixd/partition.h"

namespace prefixd {

class PartialAppends {
 public:
  // Returns how many of the n tokens an append to these heads has appended before.
  uint32_t Done(uint32_t layer, HeadRange heads, uint32_t n) const {
    const auto it = std::ranges::find_if(appends_, [&](const Append& a) {
      return a.layer == layer && a.heads == heads && a.n == n;
    });
    return it == appends_.end() ? 0 : it->done;
  }
  // An append has come this far; any other of these heads cannot go on.
  void Note(uint32_t layer, HeadRange heads, uint32_t n, uint32_t done) {
    std::erase_if(appends_,
                  [&](const Append& a) { return a.layer == layer && Overlap(a.heads, heads); });
    if (done < n) appends_.push_back({layer, heads, n, done});
  }
  void Clear() { appends_.clear(); }

 private:
  struct Append {
    uint32_t layer;
    HeadRange heads;
    uint32_t n, done;
  };
  static bool Overlap(HeadRange a, HeadRange b) {
    const auto end = [](HeadRange r) { return r.n == 0 ? UINT64_MAX : uint64_t{r.first} + r.n; };
    return a.first < end(b) && b.first < end(a);
  }
  std::vector<Append> appends_;
};

}  // namespace prefixd
