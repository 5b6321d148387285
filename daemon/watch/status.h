// Says in JSON how a daemon stands: for the status page and `prefixctl top`.
//
// Thread-safety: free functions.
#pragma once

#include <cstdint>
#include <string>

#include "daemon/watch/watch.h"
#include "prefixd/runtime_stats.h"
#include "prefixd/store.h"
#include "protocol/codec.h"

namespace prefixd::daemon {

// Whom a status is for, and so what it names.
struct Viewer {
  enum class Sees : uint8_t { kTotals, kTenant, kAll };
  Sees sees = Sees::kTotals;  // kTotals: no tenant, prefix, session or message
  std::string tenant;         // kTenant: this one's alone
};

// What `watch` knows: {"ledger", "saved", "prefixes", "sessions", "failures", "failed", "latency",
// "points"}. Lists end after 50 entries; "sessions_left_out" and the like count the rest.
wire::Json WatchJson(const Watch& watch, const Viewer& viewer);
// Removes the tenants that the viewer may not see.
void KeepVisible(const Viewer& viewer, RuntimeStats* stats);
// All of it: {"server", "runtime", "watch"}, and in watch.prefixes those stored, too.
wire::Json StatusJson(Store& store, const Watch& watch, const wire::ServerStats& server,
                      const Viewer& viewer);

}  // namespace prefixd::daemon
