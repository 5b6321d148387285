#include "daemon/connections/call_queue.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace prefixd::daemon {

CallQueue::~CallQueue() {
  counters_.calls_waiting -= waiting_.size();
  counters_.calls_running -= running_.size();
}

void CallQueue::Add(std::shared_ptr<Call> call) {
  const bool waits = call->runs == Runs::kInTurn;
  (waits ? waiting_ : running_).push_back(std::move(call));
  ++(waits ? counters_.calls_waiting : counters_.calls_running);
}

std::shared_ptr<Call> CallQueue::Next() {
  if (turn_taken_ || waiting_.empty()) return nullptr;
  turn_taken_ = true;
  running_.splice(running_.end(), waiting_, waiting_.begin());
  --counters_.calls_waiting;
  ++counters_.calls_running;
  return running_.back();
}

void CallQueue::End(const Call& call) {
  if (call.runs == Runs::kInTurn) GiveTurn();
  const size_t ended = std::erase_if(running_, [&](const auto& c) { return c.get() == &call; });
  PREFIXD_CHECK(ended == 1, ended);
  --counters_.calls_running;
}

bool CallQueue::TakeTurn() { return !std::exchange(turn_taken_, true); }

void CallQueue::GiveTurn() {
  PREFIXD_CHECK(turn_taken_);
  turn_taken_ = false;
}

CallQueue::Calls CallQueue::Cancel(uint64_t request_id) {
  for (const auto& call : running_) {
    if (call->frame.header.request_id == request_id) call->canceller.Cancel();
  }
  Calls waited;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    const auto next = std::next(it);
    if ((*it)->frame.header.request_id == request_id) waited.splice(waited.end(), waiting_, it);
    it = next;
  }
  counters_.calls_waiting -= waited.size();
  return waited;
}

std::shared_ptr<Call> CallQueue::TakeUnbegun(uint64_t request_id) const {
  const auto found = std::ranges::find_if(running_, [&](const auto& call) {
    return call->frame.header.request_id == request_id && !call->gives_back() && call->Take();
  });
  return found == running_.end() ? nullptr : *found;
}

size_t CallQueue::running(Runs runs) const {
  return static_cast<size_t>(
      std::ranges::count_if(running_, [&](const auto& call) { return call->runs == runs; }));
}

void CallQueue::CancelEndless() {
  for (const auto& call : running_) {
    if (call->may_take_hours()) call->canceller.Cancel();
  }
}

CallQueue::Calls CallQueue::CancelAll() {
  for (const auto& call : running_) call->canceller.Cancel();
  counters_.calls_waiting -= waiting_.size();
  return std::exchange(waiting_, {});
}

}  // namespace prefixd::daemon
