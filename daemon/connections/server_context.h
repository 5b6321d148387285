// Holds the objects that the connections of a server share. Internal to daemon.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "base/memory_budget.h"
#include "daemon/access/access.h"
#include "daemon/access/tls.h"
#include "daemon/calls/slow_steps.h"
#include "daemon/limits/connection_limits.h"
#include "daemon/limits/region_memory.h"
#include "daemon/limits/slots.h"
#include "daemon/limits/tenant_threads.h"
#include "daemon/process/log_throttle.h"
#include "daemon/settings/config.h"
#include "daemon/watch/watch.h"
#include "prefixd/store.h"
#include "protocol/codec.h"

namespace prefixd::daemon {

struct ServerCounters {
  std::atomic<uint64_t> connections_open{0}, connections_total{0}, connections_refused{0};
  std::atomic<uint64_t> connections_tcp{0}, connections_silent_closed{0};
  std::atomic<uint64_t> calls{0}, calls_failed{0}, calls_dropped{0}, protocol_errors{0};
  std::atomic<uint64_t> calls_running{0}, calls_waiting{0};
  std::atomic<uint64_t> bytes_in{0}, bytes_out{0}, shared_memory_bytes{0};
  std::atomic<uint64_t> ring_calls{0}, ring_steps{0};

  wire::ServerStats Read() const;  // these fields of it alone
};

class Connection;
class StepService;

struct ServerContext {
  const Config config;
  boost::asio::io_context& io;  // one thread; never blocks
  TenantThreads& workers;       // all other calls, in order within a connection
  TenantThreads& long_calls;    // verify, wait_ready
  TenantThreads& matches;       // match
  StepService& steps;           // steps of rings
  Store* store = nullptr;
  std::shared_ptr<MemoryBudget> memory;  // the store's
  ServerCounters counters;
  Access access;            // io thread only
  TlsContext tls;           // io thread only: of new connections over TCP
  ConnectionLimits limits;  // io thread only
  LogThrottle refusals;     // io thread only: lines about peers that are refused
  Slots puts, sessions;     // of all connections
  RegionMemory regions{memory};
  Watch watch = {};                                                      // any thread
  SlowSteps slow_steps{std::chrono::milliseconds(config.slow_step_ms)};  // any thread
  std::function<wire::ServerStats()> stats;                              // any thread
  std::function<void(const Connection*)> on_gone;                        // io thread only
};

}  // namespace prefixd::daemon
