// Who is at the other end of a connection, as its hello was admitted. A plain value.
#pragma once

#include <string>

namespace prefixd::daemon {

struct Peer {
  std::string tenant;
  bool admin = false;    // requested and allowed
  bool trusted = false;  // the daemon's own user (or root) over a Unix socket
  bool local = false;    // connected over a Unix socket, which can pass descriptors
  bool read = true, write = true;
};

}  // namespace prefixd::daemon
