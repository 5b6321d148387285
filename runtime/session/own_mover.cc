#include "runtime/session/own_mover.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

#include "base/capture_errors.h"
#include "runtime/session/session_impl.h"
#include "storage/io/errors.h"

namespace prefixd {
namespace {

// Who still holds what is to be removed lets go soon; a disk may refuse for longer.
constexpr std::chrono::milliseconds kRemoveAgain{100}, kOpenAgainAtMost{1'000},
    kRefusedAgainAtMost{60'000};

}  // namespace

OwnMover::OwnMover(Remove remove)
    : remove_(std::move(remove)), worker_(WorkPriority::kBackground, [this] { return Take(); }) {}

void OwnMover::Want(std::weak_ptr<SessionImpl> session) {
  std::lock_guard lock(worker_.mutex());
  if (worker_.stopping()) return;
  wanted_.push_back(std::move(session));
  worker_.changed().notify_all();
}

void OwnMover::Drop(const storage::SegmentId& id) {
  std::lock_guard lock(worker_.mutex());
  dropped_.push_back({id, Worker::Clock::now(), kRemoveAgain});
  worker_.changed().notify_all();
}

void OwnMover::Stop() {
  worker_.Stop();
  std::deque<Dropped> left;
  {
    std::lock_guard lock(worker_.mutex());
    left.swap(dropped_);
    wanted_.clear();
  }
  // The newest first: it continues the others.
  for (auto dropped = left.rbegin(); dropped != left.rend(); ++dropped) {
    static_cast<void>(RemoveNow(dropped->id));
  }
}

Worker::Next OwnMover::Take() {
  const auto now = Worker::Clock::now();
  const auto due = std::ranges::find_if(dropped_, [&](const Dropped& d) { return d.due <= now; });
  // In turns: neither keeps the other waiting.
  if (due != dropped_.end() && (wanted_.empty() || !removed_last_)) {
    removed_last_ = true;
    return {[this, id = due->id](const std::stop_token&) { TryRemove(id); }};
  }
  removed_last_ = false;
  if (!wanted_.empty()) {
    Worker::Next next{[this, wanted = wanted_.front()](const std::stop_token& stop) {
      if (const auto session = wanted.lock()) Move(*session, stop);
    }};
    wanted_.pop_front();
    return next;
  }
  auto again = Worker::Clock::time_point::max();
  for (const Dropped& dropped : dropped_) again = std::min(again, dropped.due);
  return {{}, again};
}

void OwnMover::TryRemove(const storage::SegmentId& id) {
  const Status removed = RemoveNow(id);
  std::lock_guard lock(worker_.mutex());
  const auto same = [&](const Dropped& dropped) { return dropped.id == id; };
  const auto it = std::ranges::find_if(dropped_, same);
  if (it == dropped_.end()) return;
  if (removed.ok()) {
    dropped_.erase(it);
    return;
  }
  const bool open = removed.error().code == Code::kFailedPrecondition;
  it->pause = std::min(it->pause, open ? kOpenAgainAtMost : kRefusedAgainAtMost);
  it->due = Worker::Clock::now() + it->pause;
  it->pause *= 2;
}

void OwnMover::Move(SessionImpl& session, const std::stop_token& stop) {
  const Status moved = CaptureErrors([&] { return session.MoveOwn(stop); });
  // Whatever becomes of the log, the session must be told.
  static_cast<void>(CaptureErrors([&]() -> Status {
    const bool ended = stop.stop_requested() || !session.plan().ok();  // nobody misses it
    const std::string error = moved.ok() || ended ? "" : moved.error().message;
    if (!error.empty()) ++counters_.failed;
    if (!error.empty() && error != last_error_) {
      storage::LogWarning("own tokens of session " + std::to_string(session.info().id) +
                          " stay in memory for now: " + error);
    }
    last_error_ = error;
    return {};
  }));
  session.NoteMoved(moved.ok());
}

MovedName::~MovedName() {
  // Without memory for it, the segment goes when the store is opened next.
  static_cast<void>(CaptureErrors([&]() -> Status {
    mover_.Drop(id_);
    return {};
  }));
}

Status OwnMover::RemoveNow(const storage::SegmentId& id) {
  Status removed = CaptureErrors([&] { return remove_(id); });
  if (removed.ok() || removed.error().code == Code::kNotFound) return {};
  if (removed.error().code == Code::kFailedPrecondition) return removed;
  if (removed.error().message != last_remove_error_) {
    storage::LogWarning("own tokens of a session that is gone: " + removed.error().message);
  }
  last_remove_error_ = removed.error().message;
  return removed;
}

}  // namespace prefixd
