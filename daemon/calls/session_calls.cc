// Carries out the calls of sessions: attach, steps, reads, policies, reports, detach.
#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "daemon/calls/request_handler.h"
#include "prefixd/store.h"

namespace prefixd::daemon {

using wire::Field;
using wire::FromJson;
using wire::Json;
using wire::ToJson;

namespace {

Result<TokenRange> RangeOf(const Request& request) {
  TokenRange range;
  PREFIXD_ASSIGN(range.begin, Field<uint32_t>(request.control, "begin"));
  PREFIXD_ASSIGN(range.end, Field<uint32_t>(request.control, "end"));
  if (range.end < range.begin) return InvalidArgument("the token range ends before it begins");
  return range;
}

}  // namespace

Error NoSession(uint64_t handle) {
  return {Code::kNotFound,
          "no session " + std::to_string(handle) + " on this connection; attach first"};
}

std::shared_ptr<Session> RequestHandler::SessionOf(uint64_t handle) const {
  std::lock_guard lock(sessions_mutex_);
  const auto it = sessions_.find(handle);
  return it == sessions_.end() ? nullptr : it->second.session;
}

Result<std::shared_ptr<Session>> RequestHandler::FindSession(const Json& control) const {
  PREFIXD_ASSIGN(const uint64_t handle, Field<uint64_t>(control, "session"));
  auto session = SessionOf(handle);
  if (!session) return NoSession(handle);
  return session;
}

Result<Json> RequestHandler::Attach(const Request& request) {
  const Json empty = Json::object();
  PREFIXD_ASSIGN(AttachSpec spec,
                 FromJson<AttachSpec>(request.control.value("attach", empty), "attach"));
  PREFIXD_ASSIGN(spec.tenant, TenantFor(spec.tenant));
  if (spec.own_memory_tokens > 0 && !peer_.write) {
    return Error{
        Code::kFailedPrecondition,
        "own_memory_tokens has own tokens written to the store, which takes the right 'write', "
        "and this connection does not have it (auth.tokens); without it they stay in memory"};
  }
  PREFIXD_ASSIGN(const Inputs in, ReadInputs(request));
  if (!in.tensors.empty()) {
    PREFIXD_ASSIGN(spec.tokens, in.Elements<uint32_t>(0));
  }
  if (spec.tokens.empty() && !spec.prefix.empty()) {
    PREFIXD_ASSIGN(const std::string tenant, OwnPrefix(spec.prefix));
    if (peer_.admin) spec.tenant = tenant;  // an id names its tenant
  }
  Slots::Slot slot;
  if (limits_.session_slots) {
    PREFIXD_ASSIGN(slot, limits_.session_slots->Take(peer_.tenant));
  }
  const auto begun = Clock::now();
  PREFIXD_ASSIGN(auto session, store_.Attach(spec));
  Took(Timed::kAttach, begun);
  const uint64_t watched = limits_.watch != nullptr ? limits_.watch->Attached(session) : 0;
  return Keep(std::move(session), std::move(slot), watched);
}

Json RequestHandler::Keep(std::shared_ptr<Session> session, Slots::Slot slot, uint64_t watched) {
  const uint64_t handle = next_handle_++;
  Json reply = {{"session", handle},
                {"info", ToJson(session->info())},
                {"policy", ToJson(session->policy())}};
  std::lock_guard lock(sessions_mutex_);
  sessions_.emplace(handle, Attached{std::move(session), std::move(slot), watched});
  return reply;
}

Result<Json> RequestHandler::Fork(const Request& request) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  Slots::Slot slot;
  if (limits_.session_slots) {
    PREFIXD_ASSIGN(slot, limits_.session_slots->Take(peer_.tenant));
  }
  PREFIXD_ASSIGN(auto fork, session->Fork());
  return KeepFork(std::move(fork), std::move(slot));
}

Result<Json> RequestHandler::ForkPersisted(const Request& request) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  PREFIXD_ASSIGN(const auto window, Field<uint32_t>(request.control, "window"));
  Slots::Slot slot;
  if (limits_.session_slots) {
    PREFIXD_ASSIGN(slot, limits_.session_slots->Take(peer_.tenant));
  }
  const auto begun = Clock::now();
  PREFIXD_ASSIGN(auto next, session->ForkPersisted(window));
  Took(Timed::kAttach, begun);
  return KeepFork(std::move(next), std::move(slot));
}

// A client must know whether a session has tokens that cannot be attached to again.
Result<Json> RequestHandler::KeepFork(std::shared_ptr<Session> session, Slots::Slot slot) {
  PREFIXD_ASSIGN(const SessionReport report, session->report());
  const uint64_t watched = limits_.watch != nullptr ? limits_.watch->Forked(session) : 0;
  Json reply = Keep(std::move(session), std::move(slot), watched);
  reply["own_tokens"] = report.own_tokens;
  return reply;
}

Result<Json> RequestHandler::Append(const Request& request) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  PREFIXD_ASSIGN(const auto layer, Field<uint32_t>(request.control, "layer"));
  PREFIXD_ASSIGN(const auto heads, FromJson<HeadRange>(request.control, "append"));
  PREFIXD_ASSIGN(const auto n, Field<uint32_t>(request.control, "n"));
  PREFIXD_ASSIGN(const Inputs in, ReadInputs(request));
  PREFIXD_ASSIGN(const auto k, in.Bytes(0));
  PREFIXD_ASSIGN(const auto v, in.Bytes(1));
  PREFIXD_TRY(session->Append(layer, heads, n, k, v));
  return Json::object();
}

Result<Json> RequestHandler::Truncate(const Request& request) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  PREFIXD_ASSIGN(const auto n, Field<uint32_t>(request.control, "n"));
  PREFIXD_TRY(session->Truncate(n));
  return Json::object();
}

// Runs the steps of several sessions and layers in one message. Each has its own outcome; a
// malformed message is refused as a whole before any step runs.
Result<Json> RequestHandler::Step(const Request& request, Response* response) {
  const auto steps = request.control.find("steps");
  if (steps == request.control.end() || !steps->is_array() || steps->empty() ||
      steps->size() > wire::kMaxStepsPerMessage) {
    return InvalidArgument("field 'steps' must be a list of 1 to " +
                           std::to_string(wire::kMaxStepsPerMessage) + " steps");
  }
  PREFIXD_ASSIGN(const Inputs in, ReadInputs(request));
  PREFIXD_ASSIGN(Outputs out, ReadOutputs(request));
  const size_t n = steps->size();
  // An absent field is false; one that is no bool makes the step fail below.
  const auto appends = [&](size_t i) {
    return (*steps)[i].is_object() && (*steps)[i].contains("append") &&
           (*steps)[i]["append"] == Json(true);
  };
  size_t inputs = n;
  for (size_t i = 0; i < n; ++i) inputs += appends(i) ? 2 : 0;
  if (in.tensors.size() != inputs || out.extents.size() != 2 * n) {
    return InvalidArgument(
        "a step message needs one input (q) and two outputs (y, lse) per step, "
        "and two more inputs (k, v) for each step that appends");
  }
  std::vector<std::vector<float>> queries(n);
  std::vector<StepInfo> infos(n);
  std::vector<Status> statuses(n);
  std::vector<StepRequest> runnable;
  std::vector<size_t> index;
  for (size_t i = 0, next = 0; i < n; ++i) {
    const Json& step = (*steps)[i];
    const size_t first = next;  // its first input
    next += appends(i) ? 3 : 1;
    auto session = step.is_object() ? FindSession(step) : InvalidArgument("a step is no map");
    if (!session.ok()) {
      statuses[i] = session.error();
      continue;
    }
    PREFIXD_ASSIGN(const auto layer, Field<uint32_t>(step, "layer"));
    PREFIXD_ASSIGN(const auto heads, FromJson<HeadRange>(step, "step"));
    PREFIXD_ASSIGN(queries[i], in.Elements<float>(first));
    PREFIXD_ASSIGN(const auto y, out.Floats(2 * i));
    PREFIXD_ASSIGN(const auto lse, out.Floats(2 * i + 1));
    runnable.push_back({session->get(), layer, queries[i], y, lse, &infos[i], {}, heads});
    if (appends(i)) {
      runnable.back().append = true;
      PREFIXD_ASSIGN(runnable.back().k, in.Bytes(first + 1));
      PREFIXD_ASSIGN(runnable.back().v, in.Bytes(first + 2));
    }
    index.push_back(i);
  }
  const auto begun = Clock::now();
  store_.StepBatch(runnable);
  Took(Timed::kStep, begun);
  if (limits_.slow_steps != nullptr) {
    limits_.slow_steps->Note(Clock::now() - begun, runnable, request.id);
  }
  for (size_t r = 0; r < runnable.size(); ++r) statuses[index[r]] = std::move(runnable[r].status);

  Json results = Json::array();
  for (size_t i = 0; i < n; ++i) {
    Json result = Json::object();
    if (!statuses[i].ok()) {
      if (!response->failed_step) response->failed_step = statuses[i].error();
      result["error"] = wire::ErrorToJson(statuses[i].error());
    } else if ((*steps)[i].value("info", Json(false)) == Json(true)) {
      result["info"] = ToJson(infos[i]);
    }
    results.push_back(std::move(result));
  }
  HandOver(request, std::move(out), response);
  return Json{{"steps", std::move(results)}};
}

Result<Json> RequestHandler::AttendExact(const Request& request, Response* response) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  PREFIXD_ASSIGN(const auto layer, Field<uint32_t>(request.control, "layer"));
  PREFIXD_ASSIGN(const auto heads, FromJson<HeadRange>(request.control, "attend_exact"));
  PREFIXD_ASSIGN(const auto n, Field<uint32_t>(request.control, "n"));
  uint32_t own_after = 0;  // a client that knows of no own tokens does not name it
  if (request.control.contains("own_after")) {
    PREFIXD_ASSIGN(own_after, Field<uint32_t>(request.control, "own_after"));
  }
  PREFIXD_ASSIGN(const Inputs in, ReadInputs(request));
  PREFIXD_ASSIGN(const auto q, in.Elements<float>(0));
  PREFIXD_ASSIGN(Outputs out, ReadOutputs(request));
  PREFIXD_ASSIGN(const auto y, out.Floats(0));
  PREFIXD_ASSIGN(const auto lse, out.Floats(1));
  PREFIXD_TRY(session->AttendExact(layer, heads, n, own_after, q, y, lse));
  HandOver(request, std::move(out), response);
  return Json::object();
}

Result<Json> RequestHandler::ReadRows(const Request& request, Response* response) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  PREFIXD_ASSIGN(const auto layer, Field<uint32_t>(request.control, "layer"));
  PREFIXD_ASSIGN(const auto kv_head, Field<uint32_t>(request.control, "kv_head"));
  PREFIXD_ASSIGN(const Inputs in, ReadInputs(request));
  PREFIXD_ASSIGN(const auto ids, in.Elements<uint32_t>(0));
  PREFIXD_ASSIGN(Outputs out, ReadOutputs(request, Tensors::kInPlace));
  PREFIXD_ASSIGN(const auto rows, out.Bytes(0));
  PREFIXD_TRY(session->ReadRows(layer, kv_head, ids, rows));
  HandOver(request, std::move(out), response);
  return Json::object();
}

Result<Json> RequestHandler::ReadRange(const Request& request, Response* response) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  PREFIXD_ASSIGN(const auto layer, Field<uint32_t>(request.control, "layer"));
  PREFIXD_ASSIGN(const auto kv_head, Field<uint32_t>(request.control, "kv_head"));
  PREFIXD_ASSIGN(const TokenRange range, RangeOf(request));
  PREFIXD_ASSIGN(Outputs out, ReadOutputs(request, Tensors::kInPlace));
  PREFIXD_ASSIGN(const auto rows, out.Bytes(0));
  PREFIXD_TRY(session->ReadRange(layer, kv_head, range, rows));
  HandOver(request, std::move(out), response);
  return Json::object();
}

Result<Json> RequestHandler::ReadLayer(const Request& request, Response* response) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  LayerSlice slice;
  PREFIXD_ASSIGN(slice.layer, Field<uint32_t>(request.control, "layer"));
  PREFIXD_ASSIGN(slice.tokens, RangeOf(request));
  PREFIXD_ASSIGN(slice.heads, FromJson<HeadRange>(request.control, "read_layer"));
  PREFIXD_ASSIGN(const bool head_major, Field<bool>(request.control, "head_major"));
  if (head_major) slice.order = KvOrder::kHeadMajor;
  if (request.control.contains("release")) {
    // A client names holds again when it does not know what became of the call that named them.
    const Status released = ReleaseNamed(request.control);
    if (!released.ok() && released.error().code != Code::kNotFound) return released.error();
  }
  PREFIXD_ASSIGN(Outputs out, ReadOutputs(request, Tensors::kInPlace));
  PREFIXD_ASSIGN(const auto k, out.Bytes(0));
  PREFIXD_ASSIGN(const auto v, out.Bytes(1));
  PREFIXD_ASSIGN(std::optional<Json> in_place,
                 LayerInPlaceFor(request, *session, {slice, k, v}, response));
  if (in_place) return *std::move(in_place);
  PREFIXD_TRY(session->ReadLayer(slice, k, v));
  HandOver(request, std::move(out), response);
  return Json::object();
}

Result<Json> RequestHandler::ReadTokens(const Request& request, Response* response) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  PREFIXD_ASSIGN(const TokenRange range, RangeOf(request));
  PREFIXD_ASSIGN(Outputs out, ReadOutputs(request));
  PREFIXD_ASSIGN(const auto bytes, out.Bytes(0));
  if (bytes.size() != size_t{range.size()} * sizeof(uint32_t)) {
    return InvalidArgument("the ids of " + std::to_string(range.size()) + " tokens take " +
                           std::to_string(size_t{range.size()} * sizeof(uint32_t)) +
                           " bytes, not " + std::to_string(bytes.size()));
  }
  std::vector<uint32_t> ids(range.size());
  PREFIXD_TRY(session->ReadTokens(range, ids));
  if (!ids.empty()) std::memcpy(bytes.data(), ids.data(), bytes.size());
  HandOver(request, std::move(out), response);
  return Json::object();
}

Result<Json> RequestHandler::Select(const Request& request, Response* response) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  PREFIXD_ASSIGN(const auto layer, Field<uint32_t>(request.control, "layer"));
  PREFIXD_ASSIGN(const auto kv_head, Field<uint32_t>(request.control, "kv_head"));
  PREFIXD_ASSIGN(const auto k, Field<uint32_t>(request.control, "k"));
  PREFIXD_ASSIGN(const Inputs in, ReadInputs(request));
  PREFIXD_ASSIGN(const auto q, in.Elements<float>(0));
  const uint64_t most = std::min(k, session->info().n_tokens);
  PREFIXD_ASSIGN(response->memory, TakeForMessage(limits_.account, most * sizeof(uint32_t)));
  PREFIXD_ASSIGN(const Selection selection, session->Select(layer, kv_head, q, k));
  const auto ids = wire::BytesOf(std::span<const uint32_t>(selection.ids));
  response->payload.assign(ids.begin(), ids.end());
  return ToJson(selection);
}

Result<Json> RequestHandler::Summary(const Request& request, Response* response) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  PREFIXD_ASSIGN(const auto kind, Field<EstimatorVariant>(request.control, "kind"));
  PREFIXD_ASSIGN(const auto layer, Field<uint32_t>(request.control, "layer"));
  PREFIXD_ASSIGN(const auto kv_head, Field<uint32_t>(request.control, "kv_head"));
  PREFIXD_ASSIGN(response->payload, session->SummaryBytes(layer, kv_head, kind));
  PREFIXD_ASSIGN(response->memory, TakeForMessage(limits_.account, response->payload.size()));
  return Json::object();
}

Result<Json> RequestHandler::SetPolicy(const Request& request) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  PREFIXD_ASSIGN(const StepPolicy policy, Field<StepPolicy>(request.control, "policy"));
  PREFIXD_TRY(session->SetPolicy(policy));
  return Json::object();
}

Result<Json> RequestHandler::Report(const Request& request) {
  PREFIXD_ASSIGN(const auto session, FindSession(request.control));
  PREFIXD_ASSIGN(const SessionReport report, session->report());
  return ToJson(report);
}

Result<SessionReport> RequestHandler::End(const Attached& attached) {
  Result<SessionReport> report = attached.session->Detach();
  if (limits_.watch != nullptr) {
    const Result<SessionReport> last = report.ok() ? report : attached.session->report();
    limits_.watch->Detached(attached.watched, last.ok() ? last->total : Ledger());
  }
  return report;
}

Result<Json> RequestHandler::Detach(const Request& request) {
  PREFIXD_ASSIGN(const uint64_t handle, Field<uint64_t>(request.control, "session"));
  Attached ended;
  {
    std::lock_guard lock(sessions_mutex_);
    const auto it = sessions_.find(handle);
    if (it == sessions_.end()) return NoSession(handle);
    ended = std::move(it->second);
    sessions_.erase(it);
  }
  PREFIXD_ASSIGN(const SessionReport report, End(ended));
  return ToJson(report);
}

}  // namespace prefixd::daemon
