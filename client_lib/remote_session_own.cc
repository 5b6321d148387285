// Appends own tokens to a session over a connection, and attends over them.
#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/session_arguments.h"
#include "client_lib/put_wait.h"
#include "client_lib/remote_session.h"
#include "client_lib/remote_store.h"

namespace prefixd {

using wire::MessageType;

Status RemoteSession::AttendExact(uint32_t layer, HeadRange heads, uint32_t n, uint32_t own_after,
                                  std::span<const float> q, std::span<float> y,
                                  std::span<float> lse) {
  const CallScope scope(Limits());
  PREFIXD_TRY(CheckOpen());
  const KvGeometry& g = info_.geometry;
  PREFIXD_ASSIGN(heads, CheckQueries(g, layer, heads, n, q, y, lse));
  const LayerShape shape = g.layer(layer);
  const size_t per_query = size_t{heads.n} * shape.group_size();
  const size_t q_token = per_query * shape.key_dim, y_token = per_query * shape.value_dim;
  const auto run = static_cast<uint32_t>(
      std::min<size_t>(PerMessage((q_token + y_token + per_query) * sizeof(float)), UINT32_MAX));
  for (uint32_t done = 0; done < n;) {
    const uint32_t m = std::min(run, n - done);
    PREFIXD_ASSIGN(auto reply,
                   Do(MessageType::kAttendExact,
                      {{"layer", layer},
                       {"first_head", heads.first},
                       {"n_heads", heads.n},
                       {"n", m},
                       {"own_after", own_after + (n - done - m)}},
                      {wire::BytesOf(q.subspan(done * q_token, m * q_token))},
                      {wire::WritableBytesOf(y.subspan(done * y_token, m * y_token)),
                       wire::WritableBytesOf(lse.subspan(done * per_query, m * per_query))}));
    done += m;
  }
  return {};
}

Status RemoteSession::Append(uint32_t layer, HeadRange heads, uint32_t n,
                             std::span<const std::byte> k, std::span<const std::byte> v) {
  const CallScope scope(Limits());
  PREFIXD_TRY(CheckOpen());
  const KvGeometry& g = info_.geometry;
  PREFIXD_ASSIGN(heads, CheckOwnRows(g, layer, heads, n, k.size(), v.size()));
  const RowShape row = g.row(layer);
  const size_t key = heads.n * row.key_bytes(), value = heads.n * row.value_bytes();  // of a token
  const auto run = static_cast<uint32_t>(std::min<size_t>(PerMessage(key + value), UINT32_MAX));
  uint32_t done = 0;
  {
    std::lock_guard lock(mutex_);
    done = partial_.Done(layer, heads, n);
  }
  while (done < n) {
    const uint32_t m = std::min(run, n - done);
    PREFIXD_ASSIGN(auto reply, Over([&](const Place& at) {
                     Connection::Call call = SessionCall(MessageType::kAppend, at);
                     call.control["layer"] = layer;
                     call.control["first_head"] = heads.first;
                     call.control["n_heads"] = heads.n;
                     call.control["n"] = m;
                     call.in = {k.subspan(done * key, m * key), v.subspan(done * value, m * value)};
                     auto answer = at.connection->Do(std::move(call));
                     if (answer.ok()) place_.KeepOwn(*at.connection);
                     return answer;
                   }));
    done += m;
    std::lock_guard lock(mutex_);
    partial_.Note(layer, heads, n, done);
  }
  return {};
}

Status RemoteSession::StepAppend(uint32_t layer, HeadRange heads, std::span<const float> q,
                                 std::span<const std::byte> k, std::span<const std::byte> v,
                                 std::span<float> y, std::span<float> lse, StepInfo* info) {
  StepRequest request{this, layer, q, y, lse, info, {}, heads, true, k, v};
  RemoteStepBatch(link(), {&request, 1});
  return std::move(request.status);
}

Status RemoteSession::Truncate(uint32_t n) {
  const CallScope scope(Limits());
  PREFIXD_TRY(CheckOpen());
  const auto forget_partial = [this] {
    std::lock_guard lock(mutex_);
    partial_.Clear();
  };
  auto reply = Do(MessageType::kTruncate, {{"n", n}});
  if (!reply.ok() && n == 0 && place_.lost_own()) {
    // What is lost need not be truncated, and the session may attach elsewhere.
    place_.ForgetOwn();
    reply = Do(MessageType::kTruncate, {{"n", n}});
    if (!reply.ok()) place_.LoseOwn();
  }
  if (!reply.ok()) return reply.error();
  if (n == 0) place_.ForgetOwn();
  forget_partial();
  return {};
}

Result<std::shared_ptr<RemoteSession>> RemoteSession::Another(MessageType type, wire::Json control,
                                                              wire::Json* reply) {
  const CallScope scope(Limits());
  Attached attached;
  PREFIXD_ASSIGN(auto answer, Over([&](const Place& at) {
                   attached.place = at;
                   Connection::Call call = SessionCall(type, at);
                   call.control.update(control);
                   return at.connection->Do(std::move(call));
                 }));
  PREFIXD_TRY(ReadAttached(answer.control, attached));
  *reply = std::move(answer.control);
  return std::make_shared<RemoteSession>(place_.shared_link(), std::move(attached),
                                         call_timeout_ms_);
}

Result<std::shared_ptr<Session>> RemoteSession::Fork() {
  wire::Json reply;
  PREFIXD_ASSIGN(auto fork, Another(MessageType::kFork, wire::Json::object(), &reply));
  PREFIXD_ASSIGN(const auto own, wire::Field<uint32_t>(reply, "own_tokens"));
  if (own > 0) fork->place_.KeepOwn(*fork->place_.last().connection);
  std::lock_guard lock(mutex_);
  fork->partial_ = partial_;  // its rows are the fork's, too
  return std::shared_ptr<Session>(std::move(fork));
}

Result<PutResult> RemoteSession::Persist(std::span<const uint32_t> tokens,
                                         const PersistSpec& spec) {
  const CallScope scope(Limits());
  PREFIXD_TRY(CheckOpen());
  // It takes as long as the disk does, as the commit of a put.
  static const ProgressFn keep_waiting = [](uint64_t, uint64_t, std::string_view) { return true; };
  const auto ask = [&](const PersistSpec& asked) {
    return Over([&](const Place& at) {
      Connection::Call call = SessionCall(MessageType::kPersist, at);
      call.control["persist"] = wire::ToJson(asked);
      call.in = {wire::BytesOf(tokens)};
      call.progress = &keep_waiting;
      return at.connection->Do(std::move(call));
    });
  };
  PREFIXD_ASSIGN(auto reply, AskBesideOthers(spec, ask, [this] { return place_.lost_own(); }));
  return wire::FromJson<PutResult>(reply.control, "persist");
}

Result<std::shared_ptr<Session>> RemoteSession::ForkPersisted(uint32_t window) {
  wire::Json reply;
  PREFIXD_ASSIGN(auto next, Another(MessageType::kForkPersisted, {{"window", window}}, &reply));
  PREFIXD_ASSIGN(const auto own, wire::Field<uint32_t>(reply, "own_tokens"));
  if (own > 0) next->place_.KeepOwn(*next->place_.last().connection);
  return std::shared_ptr<Session>(std::move(next));
}

}  // namespace prefixd
