// Fits connections and puts into the descriptors that the process may have, so that accepting never
// fails for want of one.
//
// Thread-safety: free functions; call them before the store is opened.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/settings/config.h"
#include "prefixd/result.h"

namespace prefixd::daemon {

struct DescriptorShares {
  uint64_t connections = 0;  // may be fewer than configured
  uint64_t puts = 0;         // that all connections together may have open
  std::string warning;       // why there are fewer connections; empty: there are not
};

// Divides so many descriptors. kFailedPrecondition names how many it takes.
Result<DescriptorShares> DivideDescriptors(const Config& config, uint64_t descriptors);

// Lowers limits.max_connections to the share. Parts of it that are given leave others a quarter
// then: they were chosen for the larger total.
void LowerConnections(const DescriptorShares& shares, Config* config);

// Raises the process's limit as far as it may, and returns it.
uint64_t RaiseDescriptorLimit();

}  // namespace prefixd::daemon
