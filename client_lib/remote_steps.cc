#include "client_lib/remote_steps.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "base/check.h"
#include "protocol/codec.h"
#include "protocol/step_frame.h"

namespace prefixd {
namespace {

using wire::Json;

// Then the limits of one are those of all.
bool OfOneSession(std::span<const RemoteStep> steps) {
  return std::ranges::all_of(
      steps, [&](const RemoteStep& step) { return step.session == steps.front().session; });
}

// Sends one message with all of `steps`; they share this connection.
void SendMessage(Connection& connection, std::span<const RemoteStep> steps) {
  Connection::Call call{wire::MessageType::kStep, Json::object(), {}, {}, nullptr, {}};
  Json sent = Json::array();
  for (const RemoteStep& step : steps) {
    const StepRequest& r = *step.request;
    sent.push_back({{"session", step.session},
                    {"layer", r.layer},
                    {"first_head", r.heads.first},
                    {"n_heads", r.heads.n},
                    {"info", r.info != nullptr}});
    call.in.push_back(wire::BytesOf(r.q));
    if (r.append) {
      sent.back()["append"] = true;
      call.in.push_back(r.k);
      call.in.push_back(r.v);
    }
    call.out.push_back(wire::WritableBytesOf(r.y));
    call.out.push_back(wire::WritableBytesOf(r.lse));
  }
  call.control["steps"] = std::move(sent);
  // Where several sessions' steps share a message, the daemon keeps to each one's bound, and a
  // cancellation of one ends the message: the others go again (RemoteStepBatch).
  const bool alone = OfOneSession(steps);
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

wire::StepEntry EntryOf(const RemoteStep& step) {
  constexpr size_t kRoomForErrors = 512;
  const StepRequest& r = *step.request;
  const KvGeometry& g = *step.geometry;
  const auto size = [](const auto& tensor) {
    return static_cast<uint32_t>(std::min<size_t>(tensor.size(), UINT32_MAX));  // fits no slot
  };
  const LayerShape shape = r.layer < g.n_layers ? g.layer(r.layer) : LayerShape{};
  const uint32_t info = r.info ? wire::StepInfoRoom(shape.n_kv_heads, shape.n_q_heads) : 0;
  return {step.session,
          r.layer,
          r.info != nullptr,
          size(r.q),
          size(r.y),
          size(r.lse),
          std::max<uint32_t>(info, kRoomForErrors),
          r.heads,
          r.append,
          r.append ? size(r.k) : 0,
          r.append ? size(r.v) : 0};
}

std::span<std::byte> Part(std::span<std::byte> slot, uint64_t at, uint64_t bytes) {
  PREFIXD_CHECK(at <= slot.size() && bytes <= slot.size() - at, at, bytes, slot.size());
  return slot.subspan(at, bytes);
}

void WriteRequest(std::span<const RemoteStep> steps, wire::StepHeader header,
                  std::span<std::byte> slot) {
  wire::StepLayout layout(header.n_steps);
  for (size_t i = 0; i < steps.size(); ++i) {
    const wire::StepEntry entry = EntryOf(steps[i]);
    wire::EncodeStepEntry(
        entry, Part(slot, wire::kStepHeaderBytes + i * wire::kStepEntryBytes, wire::kStepEntryBytes)
                   .first<wire::kStepEntryBytes>());
    const StepRequest& r = *steps[i].request;
    const auto places = layout.Add(entry);
    const auto copy = [&](uint64_t at, std::span<const std::byte> tensor) {
      const auto place = Part(slot, at, tensor.size());
      if (!tensor.empty()) std::memcpy(place.data(), tensor.data(), tensor.size());
    };
    copy(places.q, wire::BytesOf(r.q));
    if (!r.append) continue;
    copy(places.k, r.k);
    copy(places.v, r.v);
  }
  header.bytes = static_cast<uint32_t>(layout.request_bytes());
  wire::EncodeStepHeader(header, slot.first<wire::kStepHeaderBytes>());
}

Status ReadAnswer(const RemoteStep& step, const wire::StepEntry& entry,
                  const wire::StepOutcome& outcome, const wire::StepLayout::Places& places,
                  std::span<std::byte> slot) {
  const StepRequest& r = *step.request;
  const auto tail =
      Part(slot, places.tail, std::min<uint64_t>(outcome.tail_bytes, entry.tail_bytes));
  if (!outcome.ok()) return wire::DecodeError(outcome, tail);
  const auto y = wire::WritableBytesOf(r.y), lse = wire::WritableBytesOf(r.lse);
  if (!y.empty()) std::memcpy(y.data(), Part(slot, places.y, y.size()).data(), y.size());
  if (!lse.empty()) std::memcpy(lse.data(), Part(slot, places.lse, lse.size()).data(), lse.size());
  return r.info ? wire::DecodeStepInfo(tail, r.info) : Status();
}

// Sends all of `steps` in one slot. False: they do not fit, or no slot is free.
bool SendThroughRing(Connection& connection, std::span<const RemoteStep> steps) {
  RingCalls* const ring = connection.ring();
  if (ring == nullptr || steps.size() > wire::kMaxStepsPerFrame) return false;
  // Both processes would take the same slot: the ring is shared, the list of its free slots is not.
  if (!connection.CheckProcess().ok()) return false;
  const auto n = static_cast<uint32_t>(steps.size());
  wire::StepLayout layout(n);
  for (const RemoteStep& step : steps) layout.Add(EntryOf(step));
  if (std::max(layout.request_bytes(), layout.answer_bytes()) > ring->slot_bytes()) return false;
  const std::optional<uint32_t> taken = ring->Take();
  if (!taken) return false;
  const std::span<std::byte> slot = ring->slot(*taken);
  std::optional<CallScope> scope;
  if (OfOneSession(steps)) scope.emplace(steps.front().limits);
  const Connection::Bound bound = connection.BoundNow(/*timed=*/true);
  WriteRequest(steps, {n, 0, bound.deadline_ms, ring->spin_us()}, slot);
  // A cancellation of one step ends them all: the others go again (RemoteStepBatch). A deadline is
  // known to the daemon.
  const auto is_cancelled = [](const Status& goes_on) {
    return !goes_on.ok() && goes_on.error().code == Code::kCancelled;
  };
  const Status answered = connection.AwaitStep(*taken, bound, [&] {
    return is_cancelled(CheckCall()) || std::ranges::any_of(steps, [&](const RemoteStep& step) {
             return is_cancelled(step.limits.Check());
           });
  });
  const auto fail_all = [&](const Error& error) {
    for (const RemoteStep& step : steps) step.request->status = error;
  };
  if (!answered.ok()) {
    fail_all(answered.error());
    return true;  // the slot is lost with the connection
  }
  const auto outcome = wire::DecodeAnswer(slot.first<wire::kStepHeaderBytes>(), n);
  if (!outcome.ok()) {
    fail_all(outcome.error());
  } else if (!outcome->ok()) {
    fail_all(wire::DecodeError(*outcome, slot.subspan(wire::kStepHeaderBytes)));
  } else {
    layout = wire::StepLayout(n);
    for (uint32_t i = 0; i < n; ++i) {
      const wire::StepEntry entry = EntryOf(steps[i]);
      const auto result =
          wire::DecodeOutcome(slot.subspan(wire::kStepHeaderBytes + i * wire::kStepResultBytes)
                                  .first<wire::kStepResultBytes>());
      steps[i].request->status = ReadAnswer(steps[i], entry, result, layout.Add(entry), slot);
    }
  }
  ring->Free(*taken);
  return true;
}

}  // namespace

void SendSteps(std::span<RemoteStep> steps) {
  // Sorting usually makes one message, because all sessions of a client share its connection.
  if (!std::ranges::is_sorted(steps, std::less<>{}, &RemoteStep::connection)) {
    std::ranges::stable_sort(steps, std::less<>{}, &RemoteStep::connection);
  }
  for (size_t begin = 0; begin < steps.size();) {
    Connection* const connection = steps[begin].connection;
    size_t end = begin;
    uint64_t bytes = 0;
    while (end < steps.size() && end - begin < wire::kMaxStepsPerMessage &&
           steps[end].connection == connection) {
      const StepRequest& r = *steps[end].request;
      const uint64_t add = r.q.size_bytes() + r.y.size_bytes() + r.lse.size_bytes() +
                           (r.append ? r.k.size() + r.v.size() : 0) + 5 * wire::kTensorAlignment;
      if (end > begin && bytes + add > connection->chunk_bytes()) break;
      bytes += add;
      ++end;
    }
    const auto together = steps.subspan(begin, end - begin);
    if (!SendThroughRing(*connection, together)) SendMessage(*connection, together);
    begin = end;
  }
}

}  // namespace prefixd
