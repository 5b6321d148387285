// Rows that the next step of a head may want, read into the host tier before it comes: those of the
// neighbours of what the last step retrieved (StepPolicy::prefetch; docs/selection.md has what that
// foretells). One thread for a store reads them, a few pages at a time and behind all other
// reading: for one session after the other, head by head in the order in which steps ended, which
// is that in which the next ones come. A head's wish ends when its next step begins: what waits for
// the disk is taken back within about a millisecond, whatever was read by then stays.
//
// Nothing depends on it: rows read ahead are verified like all others, a step that finds some in
// the tier reads them there, and what fails ahead the step meets itself. For a head whose rows were
// found damaged or unreadable nothing more is read ahead.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <vector>

#include "prefixd/result.h"
#include "prefixd/types.h"
#include "runtime/work/worker.h"

namespace prefixd {

class PreparedPrefix;
class SessionAhead;

// The tokens of `within` at this distance behind (`forward`) and before (`back`) those of `ids`
// (ascending), each where the policy reaches so far. Ascending, each once, none of `ids`.
std::vector<uint32_t> NeighboursAt(std::span<const uint32_t> ids, uint32_t distance,
                                   const StepPolicy::Prefetch& reach, TokenRange within);

// What a session may read ahead for each step of one of `heads` that retrieve, in bytes: an equal
// part of prefetch.max_mib, and of the tenth of the host tier that is for what has not been used
// twice (storage/host_tier/tier_shard.h): more would leave before it is used. kFailedPrecondition
// and kInvalidArgument, which say what would do, when that is less than a page.
Result<uint64_t> AheadBytes(uint64_t heads, const StepPolicy::Prefetch& prefetch,
                            uint64_t tier_bytes);

class RowsAhead {
 public:
  RowsAhead();
  ~RowsAhead() { Stop(); }
  RowsAhead(const RowsAhead&) = delete;
  RowsAhead& operator=(const RowsAhead&) = delete;

  void Stop();
  uint64_t queued() const;  // heads whose rows are to be read, and the one under way

 private:
  friend class SessionAhead;
  struct Running {
    SessionAhead* session = nullptr;  // null: nothing
    size_t head = 0;
  };

  Worker::Next Take();

  // By the worker's mutex.
  std::list<SessionAhead*> sessions_;  // with wishes; whose turn it is first
  Running running_;
  std::atomic<bool> stop_{false};  // what runs
  bool closed_ = false;
  Worker worker_;
};

// What one session wishes, by its plan.
class SessionAhead {
 public:
  // prefix: for as long as this lives. head_bytes: AheadBytes.
  SessionAhead(RowsAhead& rows, PreparedPrefix& prefix, const StepPolicy& policy,
               uint64_t head_bytes);
  ~SessionAhead() { End(); }
  SessionAhead(const SessionAhead&) = delete;
  SessionAhead& operator=(const SessionAhead&) = delete;

  // A step of `head` begins: what it was to find is read by now, or never. Returns what was read
  // for it and is charged to nobody yet, in bytes.
  uint64_t Begin(size_t head);
  // It has retrieved `ids` (ascending). Of more than the rows that may be read ahead, some spread
  // evenly. Where memory is short nothing is wished.
  void Want(size_t head, std::vector<uint32_t> ids);
  // Nothing is read any more when it returns, and nothing will be. Does not wait for the disk.
  void End();
  // As Begin returns.
  uint64_t Uncharged(size_t head) const { return read_[head].load(std::memory_order_relaxed); }
  uint64_t TakeUncharged(size_t head) { return read_[head].exchange(0); }

 private:
  friend class RowsAhead;
  struct Wish {
    size_t head = 0;
    std::vector<uint32_t> ids;  // that the last step retrieved
  };

  // By the queue's mutex: takes back what is wished for `head`.
  void Withdraw(size_t head);
  // Of the thread.
  Status Read(size_t head, std::span<const uint32_t> ids, const std::atomic<bool>& stop);

  RowsAhead& rows_;
  PreparedPrefix& prefix_;
  const StepPolicy policy_;
  const uint64_t head_bytes_;                // for each step of a head, at most
  std::vector<std::atomic<uint64_t>> read_;  // [heads] bytes, charged to nobody yet
  std::vector<bool> given_up_;               // [heads], of the thread: rows that cannot be read
  // By the queue's mutex.
  std::list<Wish> wishes_;
  bool ended_ = false;
};

}  // namespace prefixd
