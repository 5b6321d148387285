// Where the calls of a remote session go: a connection and the session's handle on it. After the
// daemon was away, the session attaches to the same prefix again. Internal to client_lib.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "client_lib/link.h"
#include "prefixd/attach.h"
#include "prefixd/policy.h"
#include "prefixd/session.h"
#include "prefixd/session_info.h"

namespace prefixd {

struct Place {
  std::shared_ptr<Connection> connection;
  uint64_t session = 0;  // the daemon's handle
};

struct Attached {
  Place place;
  SessionInfo info;
  StepPolicy policy;
};
Result<Attached> AttachOver(std::shared_ptr<Connection> connection, const AttachSpec& spec);

// A call of a session, ready for its inputs and outputs.
Connection::Call SessionCall(wire::MessageType type, const Place& at);

class SessionPlace {
 public:
  SessionPlace(std::shared_ptr<Link> link, Place at) : link_(std::move(link)), at_(std::move(at)) {}

  const Link& link() const { return *link_; }
  // Returns the last place, whether its connection is broken or not.
  Place last() const;
  // Returns the place; where its connection is broken, attaches over another one to the same tokens
  // of the same prefix, with `policy`. kUnavailable when that cannot be, or may not.
  Result<Place> Find(const SessionInfo& info, const StepPolicy& policy, uint32_t call_timeout_ms);

 private:
  const std::shared_ptr<Link> link_;
  std::mutex attaching_;      // held while the session attaches again
  mutable std::mutex mutex_;  // guards at_
  Place at_;
};

}  // namespace prefixd
