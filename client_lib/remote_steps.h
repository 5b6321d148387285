// Steps of sessions over connections, in as few messages as they fit in.
#pragma once

#include <cstdint>
#include <vector>

#include "client_lib/connection.h"
#include "prefixd/client.h"

namespace prefixd {

struct RemoteStep {
  StepRequest* request;    // gets its outcome, and its output where that is success
  Connection* connection;  // alive for the call
  uint64_t session;        // the daemon's handle
};

// Returns when all are answered, or cannot be any more; one message waits for the other.
void SendSteps(std::vector<RemoteStep> steps);

}  // namespace prefixd
