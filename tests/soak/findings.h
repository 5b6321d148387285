// Makes the report's lines of what the clients counted and what the daemon held meanwhile.
#pragma once

#include <cstdint>
#include <vector>

#include "protocol/server_stats.h"
#include "tests/soak/soak.h"
#include "tests/soak/tally.h"
#include "tests/soak/watch.h"

namespace prefixd::soak {

struct Sample {
  double at = 0;  // seconds
  Holding held;
};

void AddFindings(const Tally& tally, const wire::ServerStats& server,
                 const std::vector<Sample>& samples, double seconds, uint64_t kills,
                 uint32_t memory_mib, Report& report);

}  // namespace prefixd::soak
