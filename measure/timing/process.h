// Reads from /proc what a process holds.
#pragma once

#include <sys/types.h>

#include <cstdint>

#include "prefixd/result.h"

namespace prefixd::bench {

struct Holding {
  double rss_mib = 0, anonymous_mib = 0, shared_mib = 0;
  uint64_t sockets = 0, memory_files = 0, files = 0;  // descriptors, by what they are
  uint64_t memory_mappings = 0, mappings = 0;         // of memory files; all
  uint64_t threads = 0;
  double cpu_seconds = 0;  // since the process began
};
// kUnavailable when there is no such process (any more).
Result<Holding> Look(pid_t pid);

}  // namespace prefixd::bench
