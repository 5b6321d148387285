// Carries out steps that came through a ring: what message `step` does, without a message.
#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/call_scope.h"
#include "base/capture_errors.h"
#include "daemon/calls/request_handler.h"
#include "daemon/limits/with_memory.h"
#include "prefixd/store.h"

namespace prefixd::daemon {

using wire::kStepHeaderBytes;
using wire::kStepResultBytes;

namespace {

constexpr size_t kMostErrorBytes = 512;  // of a call as a whole

std::span<const float> Floats(const std::vector<std::byte>& bytes, uint64_t at, size_t n) {
  return {reinterpret_cast<const float*>(bytes.data() + at), n};
}

uint64_t BytesOf(const StepScratch& s) {
  return s.request.capacity() + s.answers.capacity() * sizeof(float) +
         s.entries.capacity() * sizeof(s.entries[0]) +
         s.sessions.capacity() * sizeof(s.sessions[0]) + s.infos.capacity() * sizeof(s.infos[0]) +
         s.steps.capacity() * sizeof(s.steps[0]);
}

}  // namespace

StepServed RequestHandler::StepInSlot(std::span<std::byte> slot, StepScratch& scratch) {
  StepServed served;
  const Status ran = CaptureErrors([&] { return RunSteps(slot, scratch, &served); });
  scratch.steps.clear();
  scratch.sessions.clear();  // who is detached meanwhile ends here
  scratch.memory.Set(BytesOf(scratch));
  if (!ran.ok()) {
    served.ok = false;
    NoteFailedStep(ran.error());
    const wire::StepOutcome outcome = wire::EncodeError(
        ran.error(),
        slot.subspan(kStepHeaderBytes, std::min(kMostErrorBytes, slot.size() - kStepHeaderBytes)));
    wire::EncodeAnswer(0, outcome, slot.first<kStepHeaderBytes>());
  }
  return served;
}

void RequestHandler::NoteFailedStep(const Error& error) const {
  if (limits_.watch == nullptr) return;
  WithMemory([&] {
    limits_.watch->Failed(peer_.tenant, "step", "c" + std::to_string(limits_.connection) + "-ring",
                          error);
  });
}

Status RequestHandler::RunSteps(std::span<std::byte> slot, StepScratch& s, StepServed* served) {
  // Everything is decoded from one copy; the header, which says how much to copy, is read once.
  std::array<std::byte, kStepHeaderBytes> head;
  std::memcpy(head.data(), slot.data(), head.size());
  PREFIXD_ASSIGN(const wire::StepHeader header, wire::DecodeStepHeader(head, slot.size()));
  served->spin_us = header.spin_us;
  const uint32_t n = header.n_steps;
  s.request.resize(header.bytes);
  std::memcpy(s.request.data() + head.size(), slot.data() + head.size(),
              header.bytes - head.size());
  s.entries.resize(n);
  PREFIXD_TRY(wire::DecodeStepEntries(s.request, header, slot.size(), s.entries));

  const bool slow = limits_.slow_steps != nullptr && limits_.slow_steps->on();
  size_t floats = 0;
  for (const wire::StepEntry& e : s.entries) floats += size_t{e.y_size} + e.lse_size;
  s.answers.resize(floats);
  s.infos.resize(std::max<size_t>(s.infos.size(), n));
  s.sessions.clear(), s.steps.clear();
  wire::StepLayout layout(n);
  const std::span<float> answers(s.answers);
  size_t at = 0;
  for (uint32_t i = 0; i < n; ++i) {
    const wire::StepEntry& e = s.entries[i];
    const auto places = layout.Add(e);
    const auto& session = s.sessions.emplace_back(SessionOf(e.session));
    s.steps.push_back({session.get(),
                       e.layer,
                       Floats(s.request, places.q, e.q_size),
                       answers.subspan(at, e.y_size),
                       answers.subspan(at + e.y_size, e.lse_size),
                       e.info || slow ? &s.infos[i] : nullptr,
                       {},
                       e.heads,
                       e.append,
                       std::span<const std::byte>(s.request).subspan(places.k, e.k_bytes),
                       std::span<const std::byte>(s.request).subspan(places.v, e.v_bytes)});
    at += size_t{e.y_size} + e.lse_size;
  }
  const auto begun = Clock::now();
  {
    const CallScope scope(CallLimits::Of(header.deadline_ms, nullptr));
    store_.StepBatch(s.steps);  // a step of no session fails alone
  }
  Took(Timed::kStep, begun);
  if (slow) {
    limits_.slow_steps->Note(Clock::now() - begun, s.steps,
                             "c" + std::to_string(limits_.connection) + "-ring");
  }
  served->steps = n;

  served->ok = true;
  const auto failed = [&](const Error& error, std::span<std::byte> tail) {
    if (std::exchange(served->ok, false)) NoteFailedStep(error);  // the first one
    return wire::EncodeError(error, tail);
  };
  layout = wire::StepLayout(n);
  for (uint32_t i = 0; i < n; ++i) {
    const wire::StepEntry& e = s.entries[i];
    const auto places = layout.Add(e);
    const StepRequest& step = s.steps[i];
    const std::span<std::byte> tail = slot.subspan(places.tail, e.tail_bytes);
    wire::StepOutcome outcome;
    if (step.session == nullptr) {
      outcome = failed(NoSession(e.session), tail);
    } else if (!step.status.ok()) {
      outcome = failed(step.status.error(), tail);
    } else {
      if (e.y_size > 0) std::memcpy(&slot[places.y], step.y.data(), step.y.size_bytes());
      if (e.lse_size > 0) std::memcpy(&slot[places.lse], step.lse.data(), step.lse.size_bytes());
      if (e.info) {
        const auto written = wire::EncodeStepInfo(s.infos[i], tail);
        outcome = written.ok() ? wire::StepOutcome{0, 0, *written} : failed(written.error(), tail);
      }
    }
    wire::EncodeOutcome(
        outcome, slot.subspan(kStepHeaderBytes + i * kStepResultBytes).first<kStepResultBytes>());
  }
  wire::EncodeAnswer(n, {}, slot.first<kStepHeaderBytes>());
  return {};
}

}  // namespace prefixd::daemon
