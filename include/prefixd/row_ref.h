// Locates rows.
#pragma once

#include <cstddef>
#include <cstdint>

namespace prefixd {

// One row whose key and value may lie anywhere. Owns nothing.
struct RowRef {
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
};

// Parts of rows that lie at equal distances, and where a reader wants them: part i, of `bytes`
// bytes, lies at from + i * step and goes to to + place(i) * to_step. Owns nothing.
struct RowCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  uint32_t bytes = 0, n = 0, step = 0;
  size_t to_step = 0;
  const uint16_t* places = nullptr;  // [n]; null: 0, 1, ...

  size_t place(uint32_t i) const { return places == nullptr ? i : places[i]; }
};

}  // namespace prefixd
