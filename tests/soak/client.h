// One client process of the soak: sessions, steps, puts and all other calls at random, each answer
// held against the embedded store's.
#pragma once

#include <cstdint>
#include <string>

#include "prefixd/client.h"
#include "tests/soak/tally.h"
#include "tests/soak/world.h"

namespace prefixd::soak {

struct ClientPlan {
  std::string address;
  ConnectOptions connect;
  uint64_t seed = 0;
  uint32_t sessions = 10;  // held at a time
};

// Returns when tally.stop is set, everything detached; the parent may also kill the process.
void RunClient(const World& world, const ClientPlan& plan, Tally& tally);

}  // namespace prefixd::soak
