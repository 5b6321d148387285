#include "client_lib/remote_session.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/session_arguments.h"
#include "client_lib/remote_store.h"

namespace prefixd {

using wire::FromJson;
using wire::MessageType;

RemoteSession::~RemoteSession() {
  if (!open_ || !link().CheckProcess().ok()) return;  // a child's copy is not the session
  const Place at = place_.last();
  // Not under the limits of the call that drops it, which may have ended, but bounded as its own.
  const CarriedScope no_other(nullptr);
  const CallScope scope(Limits());
  at.connection->EndAtDaemon(SessionCall(MessageType::kDetach, at));
}

Result<Place> RemoteSession::Find() const {
  PREFIXD_TRY(CheckOpen());
  PREFIXD_ASSIGN(auto live, place_.Live());
  if (live) return *std::move(live);
  PREFIXD_ASSIGN(Place found, place_.Find(info_, policy(), call_timeout_ms_));
  if (!open_) {  // Detach came meanwhile, and may have seen the last place alone
    const CarriedScope to_its_end(nullptr);
    (void)found.connection->Do(SessionCall(MessageType::kDetach, found));
    return SessionDetached(info_.id);
  }
  return found;
}

Status RemoteSession::SetPolicy(const StepPolicy& policy) {
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(auto reply, Do(MessageType::kSetPolicy, {{"policy", wire::ToJson(policy)}}));
  std::lock_guard lock(mutex_);
  policy_ = policy;
  return {};
}

Status RemoteSession::Step(uint32_t layer, HeadRange heads, std::span<const float> q,
                           std::span<float> y, std::span<float> lse, StepInfo* info) {
  StepRequest request{this, layer, q, y, lse, info, {}, heads};
  RemoteStepBatch(link(), {&request, 1});
  return std::move(request.status);
}

Result<Selection> RemoteSession::Select(uint32_t layer, uint32_t kv_head, std::span<const float> q,
                                        uint32_t k) {
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(auto reply,
                 Do(MessageType::kSelect, {{"layer", layer}, {"kv_head", kv_head}, {"k", k}},
                    {wire::BytesOf(q)}));
  PREFIXD_ASSIGN(Selection selection, FromJson<Selection>(reply.control, "selection"));
  selection.ids.resize(reply.payload.size() / sizeof(uint32_t));
  std::copy_n(reply.payload.begin(), selection.ids.size() * sizeof(uint32_t),
              std::as_writable_bytes(std::span(selection.ids)).begin());
  return selection;
}

Result<std::vector<std::byte>> RemoteSession::SummaryBytes(uint32_t layer, uint32_t kv_head,
                                                           const EstimatorVariant& variant) {
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(auto reply,
                 Do(MessageType::kSummary,
                    {{"kind", variant.Name()}, {"layer", layer}, {"kv_head", kv_head}}));
  return std::move(reply.payload);
}

Result<SessionReport> RemoteSession::report() const {
  PREFIXD_TRY(link().CheckProcess());
  if (!open_) return LastReport();
  const CallScope scope(Limits());
  PREFIXD_ASSIGN(auto reply, Do(MessageType::kReport, wire::Json::object()));
  PREFIXD_ASSIGN(SessionReport report, FromJson<SessionReport>(reply.control, "report"));
  std::lock_guard lock(mutex_);
  last_ = report;
  return report;
}

SessionReport RemoteSession::LastReport() const {
  std::lock_guard lock(mutex_);
  SessionReport report = last_;
  report.info = info_;
  return report;
}

Result<SessionReport> RemoteSession::Detach() {
  PREFIXD_TRY(link().CheckProcess());
  if (!open_.exchange(false)) return SessionDetached(info_.id);
  const CallScope scope(Limits());
  const Place at = place_.last();
  auto reply = at.connection->Do(SessionCall(MessageType::kDetach, at));
  // The daemon that went away has ended the session, which is what was asked for.
  if (!reply.ok() && at.connection->lost()) return LastReport();
  if (!reply.ok() && EndedEarly(reply.error())) open_ = true;  // it may be repeated
  if (!reply.ok()) return std::move(reply).error();
  PREFIXD_ASSIGN(SessionReport report, FromJson<SessionReport>(reply->control, "report"));
  std::lock_guard lock(mutex_);
  last_ = report;
  return report;
}

Result<Connection::Reply> RemoteSession::Do(MessageType type, wire::Json control,
                                            std::vector<std::span<const std::byte>> in,
                                            std::vector<std::span<std::byte>> out) const {
  return Over([&](const Place& at) {
    control["session"] = at.session;
    return at.connection->Do({type, control, in, out, nullptr, {}});
  });
}

size_t RemoteSession::PerMessage(size_t item_bytes) const {
  const uint64_t chunk = place_.last().connection->chunk_bytes();
  const uint64_t room = chunk - std::min<uint64_t>(chunk / 2, 4 * wire::kTensorAlignment);
  return std::max<size_t>(room / item_bytes, 1);
}

Result<std::shared_ptr<Session>> AttachRemote(std::shared_ptr<Link> link, const AttachSpec& spec) {
  const CallScope scope(CallLimits::Of(spec.call_timeout_ms, nullptr));
  auto attached = link->Run([&](auto connection) { return AttachOver(connection, spec); });
  if (!attached.ok()) return attached.error();
  return std::shared_ptr<Session>(
      std::make_shared<RemoteSession>(std::move(link), *std::move(attached), spec.call_timeout_ms));
}

}  // namespace prefixd
