// A change of how long a prefix stays. A plain value.
#pragma once

#include <cstdint>
#include <optional>

namespace prefixd::storage {

// Says how long a prefix stays from now on. Absent members leave their value as it is.
struct LifetimeChange {
  std::optional<bool> pinned;
  std::optional<int64_t> expires_unix_ms;  // 0: never
};

}  // namespace prefixd::storage
