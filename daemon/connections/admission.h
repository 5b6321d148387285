// Decides on a hello whether a client may connect, and with which rights.
#pragma once

#include "daemon/access/access.h"
#include "daemon/calls/peer.h"
#include "daemon/connections/server_context.h"
#include "daemon/limits/region_memory.h"
#include "prefixd/result.h"
#include "protocol/codec.h"
#include "protocol/shared_region.h"
#include "protocol/step_ring.h"

namespace prefixd::daemon {

struct Admission {
  Credential credential;
  Peer peer;
  wire::HelloReply reply;
  SharedRegion region;         // empty: not requested, not allowed, or not to be had
  RegionMemory::Taken memory;  // the region's
  StepRing ring;               // empty, too: not for clients over TCP, or of another version
  RegionMemory::Taken ring_memory;
  MemoryAccount account;  // the tenant's
};

// `socket`: the descriptor of connection `id`; for a `local` one the system names the peer's user.
// kFailedPrecondition: a missing or wrong token, or rights that the peer may not have;
// kResourceExhausted: its tenant has as many connections as it may.
Result<Admission> Admit(ServerContext& context, const wire::Hello& hello, bool local, int socket,
                        uint64_t id);

}  // namespace prefixd::daemon
