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

// A step in flight may still hold what is to be removed.
constexpr std::chrono::milliseconds kRemoveAgain{100};

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
  dropped_.push_back({id, Worker::Clock::now()});
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
  for (auto dropped = left.rbegin(); dropped != left.rend(); ++dropped) RemoveNow(dropped->id);
}

Worker::Next OwnMover::Take() {
  const auto now = Worker::Clock::now();
  for (size_t i = 0; i < dropped_.size(); ++i) {
    if (dropped_[i].due > now) continue;
    const storage::SegmentId id = dropped_[i].id;
    return {[this, id](const std::stop_token&) {
      const bool gone = RemoveNow(id);
      std::lock_guard lock(worker_.mutex());
      const auto same = [&](const Dropped& dropped) { return dropped.id == id; };
      const auto it = std::ranges::find_if(dropped_, same);
      if (it == dropped_.end()) return;
      if (gone) {
        dropped_.erase(it);
      } else {
        it->due = Worker::Clock::now() + kRemoveAgain;
      }
    }};
  }
  if (!wanted_.empty()) {
    std::weak_ptr<SessionImpl> next = std::move(wanted_.front());
    wanted_.pop_front();
    return {[this, next = std::move(next)](const std::stop_token& stop) {
      if (const auto session = next.lock()) Move(*session, stop);
    }};
  }
  auto again = Worker::Clock::time_point::max();
  for (const Dropped& dropped : dropped_) again = std::min(again, dropped.due);
  return {{}, again};
}

void OwnMover::Move(SessionImpl& session, const std::stop_token& stop) {
  const Status moved = CaptureErrors([&] { return session.MoveOwn(stop); });
  const bool ended = stop.stop_requested() || !session.plan().ok();  // nobody misses it
  const std::string error = moved.ok() || ended ? "" : moved.error().message;
  if (!error.empty()) ++counters_.failed;
  if (!error.empty() && error != last_error_) {
    storage::LogWarning("own tokens of session " + std::to_string(session.info().id) +
                        " stay in memory for now: " + error);
  }
  last_error_ = error;
  session.NoteMoved(moved.ok());
}

MovedName::~MovedName() {
  // Without memory for it, the segment goes when the store is opened next.
  static_cast<void>(CaptureErrors([&]() -> Status {
    mover_.Drop(id_);
    return {};
  }));
}

bool OwnMover::RemoveNow(const storage::SegmentId& id) const {
  const Status removed = CaptureErrors([&] { return remove_(id); });
  if (removed.ok() || removed.error().code == Code::kNotFound) return true;
  if (removed.error().code != Code::kFailedPrecondition) {
    storage::LogWarning("own tokens of a session that is gone: " + removed.error().message);
  }
  return false;
}

}  // namespace prefixd
