// Locates one row.
#pragma once

#include <cstddef>

namespace prefixd {

// One row whose key and value may lie anywhere. Owns nothing.
struct RowRef {
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
};

}  // namespace prefixd
