// Copies parts of rows from where they lie to where a reader wants them.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>

#include "prefixd/row_ref.h"

namespace prefixd {

// kStream goes past the caches, for many bytes that the copying core does not need again: others
// see them after a StreamFence (base/rows/stream_copy.h). Short parts that do not begin and end
// where lines of the caches do (kStreamLine) are slow to copy so.
enum class CopyMode : uint8_t { kCached, kStream };
inline constexpr uint64_t kStreamBytes = 4u << 20;  // reads of at least this size stream

// Has the first rows of a page brought into the caches.
inline void PrefetchRows(const std::byte* from) {
  for (int line = 0; line < 8; ++line) __builtin_prefetch(from + line * 64);
}
// Copies all parts of one copy.
void CopyRowsUnfenced(const RowCopy& copy, CopyMode mode);
// Copies all of them, and others may see them then.
void CopyRows(std::span<const RowCopy> copies, CopyMode mode);

}  // namespace prefixd
