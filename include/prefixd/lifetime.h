// Says how long a stored prefix stays.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <optional>

namespace prefixd {

// How long a stored prefix stays. An absent member leaves the stored value unchanged.
struct Lifetime {
  std::optional<bool> pinned;           // never evicted
  std::optional<uint64_t> ttl_seconds;  // from now on; 0: for ever
};

}  // namespace prefixd
