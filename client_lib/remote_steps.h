// Sends steps of sessions over their connections, in as few messages as possible.
#pragma once

#include <cstdint>
#include <vector>

#include "base/call_scope.h"
#include "client_lib/connection.h"
#include "prefixd/client.h"

namespace prefixd {

struct RemoteStep {
  StepRequest* request;    // receives its status, and its output on success
  Connection* connection;  // must live until SendSteps returns
  uint64_t session;        // the daemon's handle
  CallLimits limits;       // of the step; the session's
};

// Returns when every step has an answer or has failed. Messages are sent one after another.
void SendSteps(std::vector<RemoteStep> steps);

}  // namespace prefixd
