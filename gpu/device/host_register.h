// Makes host memory that others allocated readable by kernels at its own address.
#pragma once

#include <cstddef>
#include <span>

#include "prefixd/result.h"

namespace prefixd::gpu {

// Page-locks whole pages of memory for every device of this process, so that copies run at the
// bus's speed and kernels may read it in place. kResourceExhausted when the system cannot lock so
// much; kUnavailable without a device; kInternal when it is registered already.
// Thread-safety: any thread; takes time in proportion to the bytes.
Status RegisterHostMemory(std::span<std::byte> bytes);
// REQUIRES: the last kernel that reads the memory has ended, and the memory still exists. Pass the
// same span.
Status UnregisterHostMemory(std::span<std::byte> bytes);

// Returns whether kernels may read this byte at this very address: page-locked memory, registered
// or allocated so, or the device's. False without a device.
bool DeviceReads(const std::byte* byte);

}  // namespace prefixd::gpu
