// Where the calls of a remote session go: a connection and the session's handle on it. After the
// daemon was away, the session attaches to the same prefix again. Internal to client_lib.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
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
// Reads the reply of a call that made a session: all but the connection.
Status ReadAttached(const wire::Json& reply, Attached& attached);

// A call of a session, ready for its inputs and outputs.
Connection::Call SessionCall(wire::MessageType type, const Place& at);

class SessionPlace {
 public:
  SessionPlace(std::shared_ptr<Link> link, Place at) : link_(std::move(link)), at_(std::move(at)) {}

  const Link& link() const { return *link_; }
  const std::shared_ptr<Link>& shared_link() const { return link_; }
  // Returns the last place, whether its connection is broken or not.
  Place last() const;
  // Returns the last place if its connection lives, nothing where another is to be found.
  // kUnavailable when the session's own tokens were lost with a connection.
  Result<std::optional<Place>> Live() const;
  // The session appended own tokens over this connection. They exist there alone, so that the
  // session attaches nowhere else any more.
  void KeepOwn(const Connection& connection);
  bool has_own() const;  // also when they are lost
  bool lost_own() const;
  void ForgetOwn();
  void LoseOwn();  // they are gone, whatever was forgotten
  // Returns the place; where its connection is broken, attaches over another one to the same tokens
  // of the same prefix, with `policy`. kUnavailable when that cannot be, or may not;
  // kResourceExhausted, and the end of the call, as an attach has them: a later call may find it.
  Result<Place> Find(const SessionInfo& info, const StepPolicy& policy, uint32_t call_timeout_ms);

 private:
  const std::shared_ptr<Link> link_;
  CallMutex attaching_;  // held while the session attaches again
  bool LostOwn() const { return lost_ || (own_ && !at_.connection->alive()); }  // mutex_ is held

  mutable std::mutex mutex_;  // guards what follows
  Place at_;
  bool own_ = false;   // own tokens are at at_
  bool lost_ = false;  // own tokens were where at_ was before
};

}  // namespace prefixd
