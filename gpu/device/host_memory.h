// Defines what callers with tensors in host memory share: buffers that grow, and rows that need no
// copy. Internal to gpu/.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "attention/rows/rows.h"
#include "gpu/device/device_buffer.h"
#include "gpu/device/host_register.h"

namespace prefixd::gpu::internal {

// Buffer: DeviceBuffer or PinnedBuffer. Growing drops the old contents.
template <typename Buffer>
Status Grow(Buffer& buffer, size_t bytes) {
  if (buffer.bytes() >= bytes) return {};
  buffer = Buffer();  // release first
  PREFIXD_ASSIGN(buffer, Buffer::Allocate(bytes + bytes / 4));
  return {};
}

// Returns whether the rows are page-locked host memory or the device's own, which kernels see at
// this very address, with elements aligned.
inline bool ReadableByDevice(const RowsView& rows, DType dtype) {
  const size_t element = DTypeBytes(dtype);
  const auto aligned = [element](const std::byte* p) {
    return reinterpret_cast<uintptr_t>(p) % element == 0;
  };
  if (rows.refs) {  // rows lie anywhere, each by itself
    return std::all_of(rows.refs, rows.refs + rows.count, [&](const RowRef& row) {
      return aligned(row.key) && aligned(row.value) && DeviceReads(row.key) &&
             DeviceReads(row.value + rows.shape.value_bytes() - 1);
    });
  }
  if (!aligned(rows.data) || rows.stride % element != 0) return false;
  return DeviceReads(rows.data) && DeviceReads(rows.key(rows.count - 1) + rows.shape.bytes() - 1);
}

}  // namespace prefixd::gpu::internal
