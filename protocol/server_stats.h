// Declares the daemon's own statistics, beside RuntimeStats, and their table.
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "base/tables/field_count.h"
#include "base/tables/statistic.h"

namespace prefixd {
namespace wire {

struct ServerStats {
  std::string version, address, dir;
  uint32_t pid = 0;
  uint64_t uptime_ms = 0;
  uint64_t connections = 0, connections_tcp = 0, connections_total = 0;
  uint64_t connections_refused = 0, connections_silent_closed = 0;
  uint64_t calls = 0, calls_failed = 0, calls_dropped = 0, protocol_errors = 0;
  uint64_t calls_running = 0, calls_waiting = 0;
  uint64_t bytes_in = 0, bytes_out = 0, shared_memory_bytes = 0;
  uint64_t ring_calls = 0, ring_steps = 0;
};

}  // namespace wire

template <>
inline constexpr auto kStatistics<wire::ServerStats> = [] {
  using enum StatisticUnit;
  using S = wire::ServerStats;
  return std::tuple{
      Word("version", &S::version, "Version of the daemon.").Titled("prefixd"),
      Word("address", &S::address, "Where the asking connection came in.").Titled("address"),
      Word("dir", &S::dir, "Directory of the store.").Titled("directory"),
      Gauge("pid", &S::pid, kNone, "The daemon's process.").Titled("process"),
      Gauge("uptime_ms", &S::uptime_ms, kMilliseconds, "Time since the daemon started.")
          .Titled("running for"),
      Gauge("connections", &S::connections, kNone, "Open connections.").Titled("connections"),
      Gauge("connections_tcp", &S::connections_tcp, kNone, "Those over TCP."),
      Counter("connections_total", &S::connections_total, kNone, "Connections taken so far."),
      Counter("connections_refused", &S::connections_refused, kNone,
              "Connections refused because there were too many (limits.max_connections, "
              "limits.max_tcp_connections, limits.max_tenant_connections)."),
      Counter("connections_silent_closed", &S::connections_silent_closed, kNone,
              "Connections that said no hello and made room for new ones."),
      Counter("calls", &S::calls, kNone, "Calls received."),
      Counter("calls_failed", &S::calls_failed, kNone,
              "Calls answered by an error, and calls of steps of which one failed. Not those by "
              "which a client waits for other puts."),
      Counter("calls_dropped", &S::calls_dropped, kNone,
              "Calls that never began because their connection had ended."),
      Gauge("calls_running", &S::calls_running, kNone, "Calls that are carried out now."),
      Gauge("calls_waiting", &S::calls_waiting, kNone,
            "Calls that wait for an earlier one of their connection."),
      Counter("protocol_errors", &S::protocol_errors, kNone,
              "Connections closed because they broke the protocol."),
      Counter("bytes_in", &S::bytes_in, kBytes, "Received from clients."),
      Counter("bytes_out", &S::bytes_out, kBytes, "Sent to clients."),
      Gauge("shared_memory_bytes", &S::shared_memory_bytes, kBytes,
            "Shared memory of connections, with their rings."),
      Counter("ring_calls", &S::ring_calls, kNone,
              "The part of calls that were steps through a ring in shared memory."),
      Counter("ring_steps", &S::ring_steps, kNone, "Steps of a layer in these calls."),
  };
}();
static_assert(std::tuple_size_v<decltype(kStatistics<wire::ServerStats>)> ==
                  FieldCount<wire::ServerStats>(),
              "every member of ServerStats has an entry");

}  // namespace prefixd
