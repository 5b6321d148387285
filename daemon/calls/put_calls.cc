// Carries out the calls of a put (begin, write, commit, abort), aborts idle puts, and persists own
// tokens of sessions.
#include <spdlog/spdlog.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/call_scope.h"
#include "daemon/calls/request_handler.h"

namespace prefixd::daemon {

using wire::Field;
using wire::FromJson;
using wire::Json;
using wire::ToJson;

bool RequestHandler::Waits(const Request& request, const Error& error) {
  switch (request.type) {
    case wire::MessageType::kBeginPut:
    case wire::MessageType::kPersist:  // beside another one of the same tokens
      return error.code == Code::kUnavailable && error.retry_after_ms > 0;
    case wire::MessageType::kPutCommit:  // of a part, before the others have committed theirs
      return error.code == Code::kFailedPrecondition && error.retry_after_ms > 0;
    default:
      return false;
  }
}

Result<Json> RequestHandler::BeginPut(const Request& request) {
  if (puts_.size() >= limits_.max_puts) {
    return Error{Code::kResourceExhausted,
                 "this connection has " + std::to_string(puts_.size()) +
                     " unfinished puts (limits.max_puts); commit or abort one first"};
  }
  const Json empty = Json::object();
  PREFIXD_ASSIGN(PutSpec spec, FromJson<PutSpec>(request.control.value("put", empty), "put"));
  PREFIXD_ASSIGN(spec.tenant, TenantFor(spec.tenant));
  PREFIXD_ASSIGN(const Inputs in, ReadInputs(request));
  PREFIXD_ASSIGN(spec.tokens, in.Elements<uint32_t>(0));
  Slots::Slot slot;
  if (limits_.put_slots) {
    PREFIXD_ASSIGN(slot, limits_.put_slots->Take(peer_.tenant));
  }
  const auto begun = Clock::now();
  spec.wait_ms = 0;  // a client waits by asking again, which holds no worker
  PREFIXD_ASSIGN(auto stream, store_.BeginPut(spec));
  PREFIXD_ASSIGN(const ModelSpec model, store_.Model(spec.model));  // held by the put
  const uint64_t handle = next_handle_++;
  Json reply = {{"put", handle},
                {"missing", ToJson(stream->missing())},
                {"geometry", ToJson(model.geometry)}};
  puts_.emplace(handle, Put{std::move(stream), Clock::now(), std::move(slot), spec.model, begun});
  return reply;
}

Result<Json> RequestHandler::OnPut(const Request& request) {
  PREFIXD_ASSIGN(const uint64_t handle, Field<uint64_t>(request.control, "put"));
  const auto it = puts_.find(handle);
  if (it == puts_.end()) {
    return Error{Code::kNotFound, "no open put " + std::to_string(handle) + " on this connection"};
  }
  PutStream& put = *it->second.stream;
  bool ended = false;
  Result<Json> reply = Json::object();
  switch (request.type) {
    case wire::MessageType::kPutWrite:
      reply = PutWrite(request, it->second);
      break;
    case wire::MessageType::kPutQueries:
      reply = PutQueries(request, put);
      break;
    case wire::MessageType::kPutCommit:
      reply = PutCommit(it->second, &ended);
      break;
    default:
      put.Abort();
      ended = true;
  }
  if (ended) {
    puts_.erase(it);  // after a failed commit the destructor aborts the put
  } else {
    it->second.last_used = Clock::now();  // a call may take long: it is idle from its end on
  }
  return reply;
}

// A client sends the next pieces of a write before it knows what became of the last: what was
// refused must not leave a gap behind it.
Result<Json> RequestHandler::PutWrite(const Request& request, Put& put) {
  uint64_t piece = 0;
  if (request.control.contains("piece")) {
    PREFIXD_ASSIGN(piece, Field<uint64_t>(request.control, "piece"));
  }
  PREFIXD_ASSIGN(const auto layer, Field<uint32_t>(request.control, "layer"));
  PREFIXD_ASSIGN(const auto first, Field<uint32_t>(request.control, "first"));
  PREFIXD_ASSIGN(const auto n, Field<uint32_t>(request.control, "n"));
  // The number alone may be that of an earlier write: piece 0 of this one need not have come here.
  if (piece != 0 && PieceAt{layer, first, piece} != put.next) {
    return Error{Code::kFailedPrecondition, "piece " + std::to_string(piece) +
                                                " of a write came, but the one before it was not "
                                                "written"};
  }
  put.next = {};
  PREFIXD_ASSIGN(const Inputs in, ReadInputs(request, Tensors::kInPlace));
  PREFIXD_ASSIGN(const auto k, in.Bytes(0));
  PREFIXD_ASSIGN(const auto v, in.Bytes(1));
  PREFIXD_TRY(put.stream->Write(layer, first, n, k, v));
  put.next = {layer, first + n, piece + 1};
  return Json::object();
}

Result<Json> RequestHandler::PutQueries(const Request& request, PutStream& put) {
  PREFIXD_ASSIGN(const auto layer, Field<uint32_t>(request.control, "layer"));
  PREFIXD_ASSIGN(const auto first, Field<uint32_t>(request.control, "first"));
  PREFIXD_ASSIGN(const auto n, Field<uint32_t>(request.control, "n"));
  PREFIXD_ASSIGN(const Inputs in, ReadInputs(request));
  PREFIXD_ASSIGN(const auto q, in.Elements<float>(0));
  PREFIXD_TRY(put.WriteQueries(layer, first, n, q));
  return Json::object();
}

Result<Json> RequestHandler::PutCommit(const Put& put, bool* ended) {
  const auto begun = Clock::now();
  const Result<PutResult> result = put.stream->Commit();
  // Where rows are missing, or the call ended before it, the put can go on.
  *ended = result.ok() ||
           (result.error().code != Code::kFailedPrecondition && !EndedEarly(result.error()));
  if (!result.ok()) return result.error();
  Took(Timed::kCommit, begun);
  Took(Timed::kPut, put.begun);
  if (limits_.watch != nullptr) {
    limits_.watch->Stored(put.model, result->stored_tokens, Clock::now() - put.begun);
  }
  return ToJson(*result);
}

Result<Json> RequestHandler::Persist(const Request& request) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  const Json empty = Json::object();
  PREFIXD_ASSIGN(PersistSpec spec,
                 FromJson<PersistSpec>(request.control.value("persist", empty), "persist"));
  PREFIXD_ASSIGN(const Inputs in, ReadInputs(request));
  PREFIXD_ASSIGN(const auto tokens, in.Elements<uint32_t>(0));
  Slots::Slot slot;
  if (limits_.put_slots) {
    PREFIXD_ASSIGN(slot, limits_.put_slots->Take(peer_.tenant));
  }
  spec.wait_ms = 0;  // as of a put
  const auto begun = Clock::now();
  PREFIXD_ASSIGN(const PutResult result, session->Persist(tokens, spec));
  Took(Timed::kPut, begun);  // and no pace of a prefill: the rows were there
  return ToJson(result);
}

bool RequestHandler::HasIdlePut(std::chrono::seconds limit) const {
  const auto before = Clock::now() - limit;
  return std::ranges::any_of(puts_, [&](const auto& put) { return put.second.last_used < before; });
}

void RequestHandler::AbortIdlePuts(std::chrono::seconds limit) {
  const auto before = Clock::now() - limit;
  for (auto it = puts_.begin(); it != puts_.end();) {
    if (it->second.last_used >= before) {
      ++it;
      continue;
    }
    spdlog::warn(
        "put {} of tenant '{}' aborted: nothing was written to it for {} s "
        "(limits.put_idle_s)",
        it->first, peer_.tenant, limit.count());
    it->second.stream->Abort();
    it = puts_.erase(it);
  }
}

}  // namespace prefixd::daemon
