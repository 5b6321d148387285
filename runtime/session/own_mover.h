// Moves own tokens of sessions to the store, and removes those whose sessions are gone: in one
// thread, one session after the other.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "prefixd/result.h"
#include "runtime/work/worker.h"
#include "storage/segment/prefix_info.h"

namespace prefixd {

class SessionImpl;

class OwnMover {
 public:
  // remove: removes what a session moved; kFailedPrecondition while it is open.
  using Remove = std::function<Status(const storage::SegmentId&)>;
  explicit OwnMover(Remove remove);
  ~OwnMover() { Stop(); }
  OwnMover(const OwnMover&) = delete;
  OwnMover& operator=(const OwnMover&) = delete;

  // Moves what the session has too much of, soon.
  void Want(std::weak_ptr<SessionImpl> session);
  // Removes the segment, which nobody attends over any more, soon.
  void Drop(const storage::SegmentId& id);
  // Ends the thread, and removes what was dropped before; what cannot be removed is when the store
  // is opened next.
  void Stop();

  struct Counters {
    std::atomic<uint64_t> moves{0}, tokens{0}, failed{0};
  };
  Counters& counters() { return counters_; }
  const Counters& counters() const { return counters_; }

 private:
  struct Dropped {
    storage::SegmentId id;
    Worker::Clock::time_point due;
    std::chrono::milliseconds pause;  // after the next attempt, if it fails
  };
  Worker::Next Take();
  void Move(SessionImpl& session, const std::stop_token& stop);
  void TryRemove(const storage::SegmentId& id);
  // Without an error it is gone. Called by the worker, or when that has ended.
  Status RemoveNow(const storage::SegmentId& id);

  const Remove remove_;
  Counters counters_;
  // The worker's: what stays is logged once.
  std::string last_error_, last_remove_error_;
  // The worker's mutex guards these.
  std::deque<std::weak_ptr<SessionImpl>> wanted_;
  std::deque<Dropped> dropped_;
  bool removed_last_ = false;
  Worker worker_;
};

// Keeps own tokens that were moved stored until the last plan that has them is gone.
class MovedName {
 public:
  MovedName(OwnMover& mover, const storage::SegmentId& id) : mover_(mover), id_(id) {}
  ~MovedName();
  MovedName(const MovedName&) = delete;
  MovedName& operator=(const MovedName&) = delete;

 private:
  OwnMover& mover_;
  const storage::SegmentId id_;
};

}  // namespace prefixd
