// Decides on a hello whether a client may connect, and with which rights.
#pragma once

#include "daemon/request_handler.h"
#include "daemon/server_context.h"
#include "prefixd/result.h"
#include "protocol/codec.h"
#include "protocol/shared_region.h"
#include "protocol/step_ring.h"

namespace prefixd::daemon {

struct Admission {
  Peer peer;
  wire::HelloReply reply;
  SharedRegion region;  // empty: not requested, not allowed, or not to be had
  MemoryCharge memory;  // the region's
  StepRing ring;        // empty, too: not for clients over TCP, or of another version
  MemoryCharge ring_memory;
  MemoryAccount account;  // the tenant's
};

// `socket`: the connection's descriptor; for a `local` one the system names the peer's user.
// kFailedPrecondition: a missing or wrong token, or rights that the peer may not have.
Result<Admission> Admit(const ServerContext& context, const wire::Hello& hello, bool local,
                        int socket);

}  // namespace prefixd::daemon
