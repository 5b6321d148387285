#include "daemon/connections/server_context.h"

namespace prefixd::daemon {

wire::ServerStats ServerCounters::Read() const {
  wire::ServerStats s;
  s.connections = connections_open;
  s.connections_tcp = connections_tcp;
  s.connections_total = connections_total;
  s.connections_refused = connections_refused;
  s.connections_silent_closed = connections_silent_closed;
  s.calls = calls;
  s.calls_failed = calls_failed;
  s.calls_dropped = calls_dropped;
  s.calls_running = calls_running;
  s.calls_waiting = calls_waiting;
  s.protocol_errors = protocol_errors;
  s.bytes_in = bytes_in;
  s.bytes_out = bytes_out;
  s.shared_memory_bytes = shared_memory_bytes;
  s.ring_calls = ring_calls;
  s.ring_steps = ring_steps;
  return s;
}

}  // namespace prefixd::daemon
