// How much of a disk no put takes where nobody has said: what else lies on the disk goes on, and a
// large disk is not left idle for it.
#pragma once

#include <algorithm>
#include <cstdint>

namespace prefixd::storage {

constexpr uint64_t MinFreeOf(uint64_t disk_bytes) {
  return std::clamp<uint64_t>(disk_bytes / 20, 256ull << 20, 16ull << 30);
}

}  // namespace prefixd::storage
