// Makes a connection secret, and sure of who answers. Internal to client_lib.
#pragma once

#include "prefixd/client.h"
#include "prefixd/result.h"
#include "protocol/address.h"
#include "protocol/socket.h"

namespace prefixd {

// Speaks TLS over a socket that is connected to `address`, by the files of `options`; loads
// libprefixd-tls.so first. kFailedPrecondition: the library is missing, or the other side is not
// who it should be.
Status StartTls(const Address& address, const ConnectOptions& options, Socket::Deadline deadline,
                Socket* socket);

}  // namespace prefixd
