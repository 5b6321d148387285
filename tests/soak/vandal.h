// Connections that no client of the library makes: garbage, half-open ones, readers that read
// slowly or not at all, requests made up at random.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tests/soak/tally.h"

namespace prefixd::soak {

struct VandalPlan {
  std::string address, tcp_address;
  // Of the prompt that slow readers ask for, and what its tenant presents.
  std::string tenant, token, model;
  std::vector<uint32_t> tokens;
  uint64_t row_bytes = 0;
  uint64_t seed = 0;
};

// Returns when tally.stop is set; whatever the daemon answers is right.
void RunVandal(const VandalPlan& plan, Tally& tally);

}  // namespace prefixd::soak
