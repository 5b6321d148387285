// Sends steps of sessions over their connections: through the ring where there is one with a free
// slot that they fit, else in messages; as few of either as possible.
#pragma once

#include <cstdint>
#include <span>

#include "base/call_scope.h"
#include "client_lib/connection.h"
#include "prefixd/client.h"

namespace prefixd {

struct RemoteStep {
  StepRequest* request;    // receives its status, and its output on success
  Connection* connection;  // must live until SendSteps returns
  uint64_t session;        // the daemon's handle
  CallLimits limits;       // of the step; the session's
  const KvGeometry* geometry;
};

// Returns when every step has an answer or has failed. Messages are sent one after another. Sorts
// the steps.
void SendSteps(std::span<RemoteStep> steps);

}  // namespace prefixd
