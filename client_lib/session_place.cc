#include "client_lib/session_place.h"

#include <span>
#include <string>

#include "base/call_scope.h"
#include "protocol/codec.h"

namespace prefixd {

using wire::Field;
using wire::FromJson;
using wire::MessageType;

namespace {

Error CannotGoOn(const std::string& why) {
  return {Code::kUnavailable, "the daemon was away and this session cannot go on: " + why};
}

Error OwnTokensLost() {
  return CannotGoOn(
      "its own tokens ended with the connection; attach again and append them, or Truncate(0) to "
      "go "
      "on without them");
}

}  // namespace

Result<Attached> AttachOver(std::shared_ptr<Connection> connection, const AttachSpec& spec) {
  Connection::Call call{
      MessageType::kAttach, {{"attach", wire::ToJson(spec)}}, {}, {}, nullptr, {}};
  if (!spec.tokens.empty()) {
    call.in.push_back(wire::BytesOf(std::span<const uint32_t>(spec.tokens)));
  }
  PREFIXD_ASSIGN(auto reply, connection->Do(std::move(call)));
  Attached attached;
  PREFIXD_TRY(ReadAttached(reply.control, attached));
  attached.place.connection = std::move(connection);
  return attached;
}

Status ReadAttached(const wire::Json& reply, Attached& attached) {
  PREFIXD_ASSIGN(attached.place.session, Field<uint64_t>(reply, "session"));
  PREFIXD_ASSIGN(attached.info,
                 FromJson<SessionInfo>(reply.value("info", wire::Json::object()), "info"));
  PREFIXD_TRY(attached.info.geometry.Validate());
  PREFIXD_ASSIGN(attached.policy, Field<StepPolicy>(reply, "policy"));
  return {};
}

Connection::Call SessionCall(MessageType type, const Place& at) {
  return {type, {{"session", at.session}}, {}, {}, nullptr, {}};
}

Place SessionPlace::last() const {
  std::lock_guard lock(mutex_);
  return at_;
}

Result<std::optional<Place>> SessionPlace::Live() const {
  std::lock_guard lock(mutex_);
  if (LostOwn()) return OwnTokensLost();
  return at_.connection->alive() ? std::optional(at_) : std::nullopt;
}

void SessionPlace::KeepOwn(const Connection& connection) {
  std::lock_guard lock(mutex_);
  (at_.connection.get() == &connection ? own_ : lost_) = true;
}

bool SessionPlace::has_own() const {
  std::lock_guard lock(mutex_);
  return own_ || lost_;
}

bool SessionPlace::lost_own() const {
  std::lock_guard lock(mutex_);
  return LostOwn();
}

void SessionPlace::LoseOwn() {
  std::lock_guard lock(mutex_);
  lost_ = true;
}

void SessionPlace::ForgetOwn() {
  std::lock_guard lock(mutex_);
  own_ = lost_ = false;
}

Result<Place> SessionPlace::Find(const SessionInfo& info, const StepPolicy& policy,
                                 uint32_t call_timeout_ms) {
  PREFIXD_ASSIGN(auto live, Live());
  if (live) return *std::move(live);
  if (!link_->reconnects()) {
    return Error{Code::kUnavailable, "the connection of session " + std::to_string(info.id) +
                                         " is broken; attach again"};
  }
  PREFIXD_ASSIGN(const CallLock attaching, CallLock::Take(attaching_));
  PREFIXD_ASSIGN(live, Live());
  if (live) return *std::move(live);
  AttachSpec spec;
  spec.model = info.model;
  spec.tenant = info.tenant;
  // An id is never given to other tokens, not even by another store, and stays valid when its
  // segment is compacted into another one.
  spec.prefix = info.prefix;
  spec.n_tokens = info.n_tokens;
  spec.policy = policy;
  spec.accept_approximate = info.exact_tokens < info.n_tokens;  // the session has them
  spec.call_timeout_ms = call_timeout_ms;
  spec.own_memory_tokens = info.own_memory_tokens;
  auto again = link_->Run([&](auto connection) { return AttachOver(connection, spec); });
  if (!again.ok()) {
    // The next call may find the daemon, or time, or room.
    const Error& error = again.error();
    const bool later = error.code == Code::kUnavailable || error.code == Code::kResourceExhausted ||
                       EndedEarly(error);
    return later ? error : CannotGoOn(error.message);
  }
  const bool other = again->info.n_tokens != info.n_tokens || again->info.geometry != info.geometry;
  if (other || again->info.compressed != info.compressed) {
    again->place.connection->EndAtDaemon(SessionCall(MessageType::kDetach, again->place));
    return CannotGoOn("prefix " + info.prefix +
                      (other ? " is another one now"
                             : " was compressed meanwhile; attach again to read what is left"));
  }
  std::lock_guard lock(mutex_);
  lost_ = lost_ || own_;  // a call over the last connection has appended meanwhile
  own_ = false;
  at_ = again->place;
  if (lost_) return OwnTokensLost();
  return at_;
}

}  // namespace prefixd
