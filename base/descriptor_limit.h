// How many files the process may have open, and how many of them are for segments.
//
// Thread-safety: free functions.
#pragma once

#include <sys/resource.h>

#include <cstdint>

namespace prefixd {

inline uint64_t DescriptorLimit() {
  rlimit limit{};
  return ::getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 1024;
}

// With fewer the daemon does not start.
inline constexpr uint64_t kLeastDescriptors = 320;

// The rest is for connections, puts and the program's own.
constexpr uint64_t DescriptorsForSegments(uint64_t limit) { return limit / 4; }

}  // namespace prefixd
