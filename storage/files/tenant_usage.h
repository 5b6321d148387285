// What a tenant takes of the disk. A plain value.
#pragma once

#include <cstdint>
#include <string>

namespace prefixd::storage {

// Tells what a tenant takes of the store's space.
struct TenantUsage {
  std::string tenant;
  uint64_t bytes = 0, reserved_bytes = 0;     // stored; promised to puts under way
  uint64_t quota_bytes = 0;                   // 0: none
  uint64_t evictions = 0, evicted_bytes = 0;  // segments, since the store was opened
};

}  // namespace prefixd::storage
