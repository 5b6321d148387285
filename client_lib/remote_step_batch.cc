// Runs the steps of several sessions of a link together, and again those that the loss of the
// daemon interrupted.
#include <array>
#include <cstddef>
#include <memory_resource>
#include <utility>

#include "base/session_arguments.h"
#include "client_lib/remote_session.h"
#include "client_lib/remote_steps.h"
#include "client_lib/remote_store.h"

namespace prefixd {

void RemoteStepBatch(const Link& link, std::span<StepRequest> requests) {
  // The lists of a batch of the usual size need no memory but this.
  std::array<std::byte, 16384> room;
  std::pmr::monotonic_buffer_resource memory(room.data(), room.size());
  std::pmr::vector<RemoteStep> pending(&memory);
  std::pmr::vector<RemoteStep> steps(&memory);
  std::pmr::vector<Place> places(&memory);  // keeps the connections alive
  pending.reserve(requests.size());
  steps.reserve(requests.size());
  places.reserve(requests.size());
  for (StepRequest& r : requests) {
    const auto* session = dynamic_cast<const RemoteSession*>(r.session);
    if (session == nullptr || &session->link() != &link) {
      r.status = NotOfThisStore();
    } else {
      pending.push_back({&r, nullptr, 0, session->Limits(), &session->info().geometry});
    }
  }
  // Each cancellation may make another try necessary.
  const size_t most_tries = Link::kMostTries + pending.size();
  int lost = 0;
  for (size_t tries = 1; !pending.empty(); ++tries) {
    steps.clear();
    places.clear();
    for (RemoteStep step : pending) {
      StepRequest& r = *step.request;
      r.status = step.limits.Check();
      if (!r.status.ok()) continue;
      const CallScope scope(step.limits);
      auto at = static_cast<const RemoteSession*>(r.session)->Find();
      r.status = at.ok() ? Status() : at.error();
      if (!at.ok()) continue;
      step.connection = at->connection.get();
      step.session = at->session;
      steps.push_back(step);
      places.push_back(*std::move(at));
    }
    SendSteps(steps);
    // Steps that the loss of the daemon interrupted are sent again, and those that were cancelled
    // because another one of their message was.
    pending.clear();
    bool away = false;
    for (const RemoteStep& step : steps) {
      const Status& status = step.request->status;
      if (status.ok() && step.request->append) {
        static_cast<RemoteSession*>(step.request->session)
            ->KeptAt(*step.connection, step.request->layer, step.request->heads);
      }
      if (status.ok() || tries >= most_tries) continue;
      const bool gone = link.MayRepeat(*step.connection, status.error());
      const bool beside = status.error().code == Code::kCancelled && step.limits.Check().ok();
      if ((gone && lost + 1 < Link::kMostTries) || beside) pending.push_back(step);
      away = away || gone;
    }
    if (away) ++lost;
  }
}

}  // namespace prefixd
