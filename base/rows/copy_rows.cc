#include "base/rows/copy_rows.h"

#include <cstring>
#include <type_traits>

#include "base/rows/stream_copy.h"

namespace prefixd {
namespace {

template <typename CopyPart>
void ForEachPart(const RowCopy& copy, const CopyPart& copy_part) {
  for (uint32_t i = 0; i < copy.n; ++i) {
    copy_part(copy.to + copy.place(i) * copy.to_step, copy.from + size_t{i} * copy.step);
  }
}

bool WholeLines(const RowCopy& copy) {
  return (reinterpret_cast<uintptr_t>(copy.to) | copy.to_step | copy.bytes) % kStreamLine == 0;
}

}  // namespace

void CopyRowsUnfenced(const RowCopy& copy, CopyMode mode) {
  const bool stream = mode == CopyMode::kStream, lines = stream && WholeLines(copy);
  // Of a known size a copy is a few instructions and no call.
  const auto sized = [&]<size_t kBytes>(std::integral_constant<size_t, kBytes>) {
    if (lines) {
      return ForEachPart(copy, [](std::byte* to, const std::byte* part) {
        for (size_t at = 0; at < kBytes; at += kStreamLine) StreamLine(to + at, part + at);
      });
    }
    ForEachPart(copy, [](std::byte* to, const std::byte* part) { std::memcpy(to, part, kBytes); });
  };
  const auto known = lines || !stream;
  switch (known ? copy.bytes : 0) {
    case 64:
      return sized(std::integral_constant<size_t, 64>());
    case 128:
      return sized(std::integral_constant<size_t, 128>());
    case 256:
      return sized(std::integral_constant<size_t, 256>());
    default:
      return ForEachPart(copy, [&](std::byte* to, const std::byte* part) {
        stream ? StreamCopyUnfenced(to, part, copy.bytes)
               : static_cast<void>(std::memcpy(to, part, copy.bytes));
      });
  }
}

void CopyRows(std::span<const RowCopy> copies, CopyMode mode) {
  // Where one page ends the next lies anywhere, so that the processor does not foresee it.
  constexpr size_t kAhead = 4;  // copies
  for (size_t i = 0; i < copies.size(); ++i) {
    if (i + kAhead < copies.size()) PrefetchRows(copies[i + kAhead].from);
    CopyRowsUnfenced(copies[i], mode);
  }
  if (mode == CopyMode::kStream) StreamFence();
}

}  // namespace prefixd
