// Tells how much memory a measurement may take.
#pragma once

#include <cstdint>
#include <filesystem>

namespace prefixd::bench {

// Where the kernel says it; tests have files of their own.
struct MemoryFiles {
  std::filesystem::path meminfo = "/proc/meminfo", own_group = "/proc/self/cgroup",
                        groups = "/sys/fs/cgroup";
};

// Bytes that this process could take now without others losing theirs: what the machine has left,
// or the control group that this process is in, if that is less. 0: unknown.
uint64_t AvailableMemory(const MemoryFiles& files = {});

}  // namespace prefixd::bench
