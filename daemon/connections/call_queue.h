// Keeps the calls of one connection from their receipt to their end. Those that run in turn wait
// for one another; the others begin at once, and long ones among them end when the connection
// shall. Any of them can be cancelled: one that waits, for its turn or for a thread, never begins;
// one that runs is told, and ends by itself (base/call_scope.h).
//
// Thread-safety: the io thread alone uses it. A Call belongs to the thread that took it (Take),
// from then on; its canceller may be used by any.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <string>

#include "base/call_scope.h"
#include "daemon/calls/message.h"
#include "daemon/connections/frame_reader.h"
#include "daemon/connections/server_context.h"

namespace prefixd::daemon {

enum class Runs : uint8_t { kInTurn, kBeside, kLong };

// Made before its work begins, so that its end needs no memory.
struct Call {
  Call(Frame f, Runs r) : frame(std::move(f)), runs(r) {}

  // Whether the call is the caller's now: a worker's, or that of who ends it before one came.
  bool Take() { return !taken.exchange(true); }
  // Whether it gives something back: it is carried out however late it is, so that a client that
  // does not wait for its answer leaves nothing behind.
  bool gives_back() const {
    return frame.header.type == wire::MessageType::kDetach ||
           frame.header.type == wire::MessageType::kPutAbort ||
           frame.header.type == wire::MessageType::kReleaseRows;
  }

  // Whether it is ended where a daemon stops, rather than waited for: others, such as the persist
  // of an answer, are finished in the time there is.
  bool may_take_hours() const {
    return frame.header.type == wire::MessageType::kVerify ||
           frame.header.type == wire::MessageType::kWaitReady ||
           frame.header.type == wire::MessageType::kRewrite ||
           frame.header.type == wire::MessageType::kCompress;
  }

  Frame frame;
  const Runs runs;
  Response response;
  CallCanceller canceller;
  std::string id;  // RequestId; empty until its control part is unpacked
  std::atomic<bool> taken{false};
};

class CallQueue {
 public:
  using Calls = std::list<std::shared_ptr<Call>>;

  explicit CallQueue(ServerCounters& counters) : counters_(counters) {}
  ~CallQueue();
  CallQueue(const CallQueue&) = delete;
  CallQueue& operator=(const CallQueue&) = delete;

  // Adds a call that begins now, or waits for its turn.
  void Add(std::shared_ptr<Call> call);
  // Returns the first waiting call, which begins now; null: none waits, or the turn is taken.
  std::shared_ptr<Call> Next();
  void End(const Call& call);
  // Takes the turn for work that is no call; false: it is taken.
  bool TakeTurn();
  void GiveTurn();

  // Cancels the calls with this id (a client may give several the same). Returns those that waited
  // for their turn; they are no part of the queue any more.
  Calls Cancel(uint64_t request_id);
  // Takes a running call with this id that no thread has begun, and that gives nothing back; null:
  // there is none.
  std::shared_ptr<Call> TakeUnbegun(uint64_t request_id) const;
  void CancelEndless();
  // Cancels all that runs, and returns what waited.
  Calls CancelAll();

  // How many calls of this kind run, or wait for a thread.
  size_t running(Runs runs) const;
  bool running() const { return !running_.empty() || turn_taken_; }

 private:
  ServerCounters& counters_;
  Calls waiting_, running_;  // moved between them without allocating
  bool turn_taken_ = false;  // by a running call, or by other work
};

}  // namespace prefixd::daemon
