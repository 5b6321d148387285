// Copies past the caches: for long runs whose bytes the copying core does not need again. This is
// several times faster than memcpy on memory laid out in pages, since nothing is read before it is
// overwritten.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace prefixd {

inline constexpr size_t kStreamLine = 64;

// Copies one line to an aligned place; fenced as StreamCopyUnfenced.
inline void StreamLine(std::byte* to, const std::byte* from) {
#if defined(__SSE2__)
  __m128i part[4];
  for (int i = 0; i < 4; ++i) {
    part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
  }
  for (int i = 0; i < 4; ++i) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, part[i]);
#else
  std::memcpy(to, from, kStreamLine);
#endif
}

// Copies like memcpy; the bytes may be published to other threads only after a StreamFence.
inline void StreamCopyUnfenced(std::byte* to, const std::byte* from, size_t bytes) {
#if defined(__SSE2__)
  const size_t head = -reinterpret_cast<uintptr_t>(to) % kStreamLine;
  if (bytes >= head + kStreamLine) {
    std::memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (; bytes >= kStreamLine; to += kStreamLine, from += kStreamLine, bytes -= kStreamLine) {
      StreamLine(to, from);
    }
  }
#endif
  if (bytes > 0) std::memcpy(to, from, bytes);
}
// After the fence, other threads that learn of earlier copies in any usual way see all of them.
inline void StreamFence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}
inline void StreamCopy(std::byte* to, const std::byte* from, size_t bytes) {
  StreamCopyUnfenced(to, from, bytes);
  StreamFence();
}

}  // namespace prefixd
