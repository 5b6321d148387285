// Writes the tables of statistics in the text format of Prometheus.
//
// Names: "prefixd_", the table ("store", "server", "ledger"), the statistic; counters end with
// "_total", and times are in seconds. Lists by tenant are for who may see them.
//
// Thread-safety: free functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "daemon/watch/status.h"
#include "daemon/watch/watch.h"
#include "prefixd/runtime_stats.h"
#include "protocol/server_stats.h"

namespace prefixd::daemon {

// What the metrics say; `runtime` without what the viewer may not see.
struct MetricsInput {
  Viewer viewer;
  const wire::ServerStats& server;
  const RuntimeStats& runtime;
  const Watch::Report& watch;
  const std::map<std::string, uint64_t>& prefixes;  // by tenant
  bool ready = false;
};
// So many tenants are named at the most: what is scraped must not grow with whoever comes.
inline constexpr size_t kNamedTenants = 100;
std::string MetricsText(const MetricsInput& input);

}  // namespace prefixd::daemon
