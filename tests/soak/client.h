// One client process of the soak: sessions, steps, puts and all other calls at random, each answer
// held against the embedded store's.
#pragma once

#include <cstddef>
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
  size_t tenant = 0;       // its number, for the tally
  std::string other;       // another tenant's name; empty: there is none
  bool flood = false;      // asks for all it can get, and never pauses
  double pause_ms = 0;     // mean time between two calls
};

// Returns when tally.stop is set, everything detached; the parent may also kill the process.
void RunClient(const World& world, const ClientPlan& plan, Tally& tally);

}  // namespace prefixd::soak
