#include "client_lib/remote_steps.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <span>
#include <utility>

#include "protocol/codec.h"

namespace prefixd {
namespace {

using wire::Json;

// Sends one message with all of `steps`; they share this connection.
void SendMessage(Connection& connection, std::span<const RemoteStep> steps) {
  Connection::Call call{wire::MessageType::kStep, Json::object(), {}, {}, nullptr, {}};
  Json sent = Json::array();
  for (const RemoteStep& step : steps) {
    const StepRequest& r = *step.request;
    sent.push_back({{"session", step.session}, {"layer", r.layer}, {"info", r.info != nullptr}});
    call.in.push_back(wire::BytesOf(r.q));
    call.out.push_back(wire::WritableBytesOf(r.y));
    call.out.push_back(wire::WritableBytesOf(r.lse));
  }
  call.control["steps"] = std::move(sent);
  // Where several sessions' steps share a message, the daemon keeps to each one's bound, and a
  // cancellation of one ends the message: the others go again (RemoteStepBatch).
  const bool alone = std::ranges::all_of(
      steps, [&](const RemoteStep& step) { return step.session == steps.front().session; });
  for (const RemoteStep& step : steps) {
    if (!alone) call.cancelled_by.push_back(&step.limits);
  }
  std::optional<CallScope> scope;
  if (alone) scope.emplace(steps.front().limits);
  auto reply = connection.Do(std::move(call));
  const auto fail_all = [&](const Error& error) {
    for (const RemoteStep& step : steps) step.request->status = error;
  };
  if (!reply.ok()) return fail_all(reply.error());
  const auto results = reply->control.find("steps");
  if (results == reply->control.end() || !results->is_array() || results->size() != steps.size()) {
    return fail_all({Code::kUnavailable, "the daemon sent a malformed answer to a step"});
  }
  for (size_t i = 0; i < steps.size(); ++i) {
    const Json& result = (*results)[i];
    StepRequest& r = *steps[i].request;
    r.status = {};
    if (const auto error = result.find("error"); error != result.end()) {
      r.status = wire::ErrorFromJson(*error);
    } else if (const auto info = result.find("info"); info != result.end() && r.info != nullptr) {
      auto decoded = wire::FromJson<StepInfo>(*info, "info");
      if (decoded.ok()) {
        *r.info = *decoded;
      } else {
        r.status = decoded.error();
      }
    }
  }
}

}  // namespace

void SendSteps(std::vector<RemoteStep> steps) {
  // Sorting usually makes one message, because all sessions of a client share its connection.
  std::ranges::stable_sort(steps, std::less<>{}, &RemoteStep::connection);
  for (size_t begin = 0; begin < steps.size();) {
    Connection* const connection = steps[begin].connection;
    size_t end = begin;
    uint64_t bytes = 0;
    while (end < steps.size() && end - begin < wire::kMaxStepsPerMessage &&
           steps[end].connection == connection) {
      const StepRequest& r = *steps[end].request;
      const uint64_t add =
          r.q.size_bytes() + r.y.size_bytes() + r.lse.size_bytes() + 3 * wire::kTensorAlignment;
      if (end > begin && bytes + add > connection->chunk_bytes()) break;
      bytes += add;
      ++end;
    }
    SendMessage(*connection, std::span(steps).subspan(begin, end - begin));
    begin = end;
  }
}

}  // namespace prefixd
