// Where one row lies.
#pragma once

#include <cstddef>

namespace prefixd {

// One row whose key and value lie wherever they lie. Owns nothing.
struct RowRef {
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
};

}  // namespace prefixd
