// Who may connect, and with what: the daemon's side of hello.
#pragma once

#include "daemon/request_handler.h"
#include "daemon/server_context.h"
#include "prefixd/result.h"
#include "protocol/codec.h"
#include "protocol/shared_region.h"

namespace prefixd::daemon {

struct Admission {
  Peer peer;
  wire::HelloReply reply;
  SharedRegion region;  // empty: none was asked for, allowed or to be had
};

// `socket`: the connection's, to ask the system who is at its other end when it is `local`.
// kFailedPrecondition: a missing or wrong token, or rights that the peer may not have.
Result<Admission> Admit(const ServerContext& context, const wire::Hello& hello, bool local,
                        int socket);

}  // namespace prefixd::daemon
