// Prefetches rows that the next step of a head may want into the host tier: rows of the neighbours
// of what the last step retrieved (StepPolicy::prefetch; docs/selection.md shows how well these
// predict the next step). One thread per store reads them, a few pages at a time and behind all
// other reading: one session after the other, and head by head in the order in which steps ended,
// which is the order of the next steps. A head's prefetch ends when its next step begins: reads
// that still wait for the disk are cancelled within about a millisecond, and what was read by then
// stays.
//
// No step depends on prefetching: prefetched rows are verified like all others, a step that finds
// some in the tier reads them there, and a step meets errors itself. Prefetching stops for a head
// whose rows proved damaged or unreadable.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <list>
#include <span>
#include <vector>

#include "prefixd/partition.h"
#include "prefixd/policy.h"
#include "prefixd/result.h"
#include "runtime/work/worker.h"

namespace prefixd {

class PreparedPrefix;
class SessionPrefetch;

// Returns the tokens of `within` at this distance behind (`forward`) and before (`back`) those of
// `ids` (ascending), on each side as far as the policy reaches. Ascending, each once, without
// `ids`.
std::vector<uint32_t> NeighboursAt(std::span<const uint32_t> ids, uint32_t distance,
                                   const StepPolicy::Prefetch& reach, TokenRange within);

// Returns how many bytes a session may prefetch for each step of one of `heads` that retrieve: an
// equal part of prefetch.max_mib, and of the tenth of the host tier that holds what has not been
// used twice (storage/host_tier/tier_shard.h), since more would leave the tier before its use.
// kFailedPrecondition or kInvalidArgument, with a remedy, when that is less than a page.
Result<uint64_t> PrefetchBytes(uint64_t heads, const StepPolicy::Prefetch& prefetch,
                               uint64_t tier_bytes);

class Prefetcher {
 public:
  Prefetcher();
  ~Prefetcher() { Stop(); }
  Prefetcher(const Prefetcher&) = delete;
  Prefetcher& operator=(const Prefetcher&) = delete;

  void Stop();
  uint64_t queued() const;  // heads whose rows are queued, and the one being read

 private:
  friend class SessionPrefetch;
  struct Running {
    SessionPrefetch* session = nullptr;  // null: idle
    size_t head = 0;
  };

  Worker::Next Take();

  // The worker's mutex guards these.
  std::list<SessionPrefetch*> sessions_;  // sessions with queued heads, the next one first
  Running running_;
  std::atomic<bool> stop_{false};  // stops the running read
  bool closed_ = false;
  Worker worker_;
};

// Queues what one session wants prefetched, by its plan.
class SessionPrefetch {
 public:
  // prefix: outlives this object. head_bytes: from PrefetchBytes.
  SessionPrefetch(Prefetcher& rows, PreparedPrefix& prefix, const StepPolicy& policy,
                  uint64_t head_bytes);
  ~SessionPrefetch() { End(); }
  SessionPrefetch(const SessionPrefetch&) = delete;
  SessionPrefetch& operator=(const SessionPrefetch&) = delete;

  // A step of `head` begins: its prefetch is cancelled where it is not done. Returns the bytes read
  // for it that no step was charged with yet.
  uint64_t Begin(size_t head);
  // The step has retrieved `ids` (ascending). Of more ids than rows that may be prefetched, some
  // are used, spread evenly. Where memory is short nothing is queued.
  void Want(size_t head, std::vector<uint32_t> ids);
  // Cancels all reads; on return none runs, and none will. Does not wait for the disk.
  void End();
  // The bytes that Begin returns.
  uint64_t Uncharged(size_t head) const { return read_[head].load(std::memory_order_relaxed); }
  uint64_t TakeUncharged(size_t head) { return read_[head].exchange(0); }

 private:
  friend class Prefetcher;
  struct Wish {
    size_t head = 0;
    std::vector<uint32_t> ids;  // retrieved by the last step
  };

  // Takes `head` off the queue. The worker's mutex is held.
  void Withdraw(size_t head);
  // The worker's thread calls this.
  Status Read(size_t head, std::span<const uint32_t> ids, const std::atomic<bool>& stop);

  Prefetcher& rows_;
  PreparedPrefix& prefix_;
  const StepPolicy policy_;
  const uint64_t head_bytes_;                // at most, for each step of a head
  std::vector<std::atomic<uint64_t>> read_;  // [heads] bytes that no step was charged with
  std::vector<bool> given_up_;               // [heads] rows cannot be read; the thread's alone
  // The worker's mutex guards these.
  std::list<Wish> wishes_;
  bool ended_ = false;
};

}  // namespace prefixd
