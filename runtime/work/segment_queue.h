// Runs one kind of work per segment in a background thread, and tracks each segment's state. A
// store has two queues: the ingest, which derives the data beside a segment, and the rewriting. A
// job that fails for memory (Error::retry_after_ms) is tried again until it is done.
//
// Thread-safety: all methods may be called concurrently; Stop ends the work promptly.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>

#include "prefixd/ingest.h"
#include "prefixd/progress.h"
#include "prefixd/result.h"
#include "runtime/work/work_progress.h"
#include "runtime/work/worker.h"
#include "storage/segment/prefix_info.h"

namespace prefixd {

class SegmentQueue {
 public:
  using Job = std::function<Status(const storage::SegmentId&, WorkProgress&)>;

  struct Standing {
    IngestState state = IngestState::kPending;
    std::optional<Error> error;
  };

  // makes: names the job's results in messages ("summaries"). pace: which jobs keep to unless
  // somebody waits for them; must outlive it.
  SegmentQueue(std::string makes, BackgroundPace& pace, Job job);
  ~SegmentQueue() { Stop(); }

  // Segments run in order of arrival: parents before children. One whose job lacks memory for a
  // while goes behind those that wait.
  void Enqueue(const storage::SegmentId& id);
  // Queues the segment unless it is known, so that callers can wait for a segment that a concurrent
  // put just committed.
  void EnqueueUnknown(const storage::SegmentId& id);
  // Has a segment that waits come next.
  void PutFirst(const storage::SegmentId& id);
  void MarkReady(const storage::SegmentId& id);
  // Queues again what failed for a reason that may pass, such as a disk that did not answer: a
  // minute after the failure, then after twice as long each time, up to an hour.
  void RetryFailed(std::chrono::steady_clock::time_point now = std::chrono::steady_clock::now());
  Standing Get(const storage::SegmentId& id) const;
  bool Knows(const storage::SegmentId& id) const;  // queued, running, or done
  // Waits for all of `chain`. kCancelled when `progress` returns false or the queue stops;
  // kNotFound when one of them was forgotten meanwhile; the job's own error, naming the segment,
  // when it failed.
  Status Wait(std::span<const storage::SegmentId> chain, const ProgressFn& progress);
  // Waits until nothing is queued or running. kCancelled as in Wait.
  Status WaitIdle(const ProgressFn& progress);
  // Removes a segment, and stops its work if that is running.
  void Forget(const storage::SegmentId& id);
  // Forgets segments that are not stored any more, except for the running one.
  void Prune(const std::function<bool(const storage::SegmentId&)>& stored);
  // Stops the work between two heads; the next start of the store does the rest.
  void Stop();
  uint64_t queued() const;

 private:
  struct Entry {
    Standing standing;
    std::shared_ptr<WorkProgress> progress;  // the current run's, or the last one's
    // Of a failure that may pass; none otherwise.
    std::optional<std::chrono::steady_clock::time_point> again{};
    std::chrono::minutes pause{0};  // before `again`
  };

  // Require the worker's mutex.
  void Push(const storage::SegmentId& id);  // unless it is queued
  void Pull(const storage::SegmentId& id);  // out of the queue
  Worker::Next Take();
  void Run(const storage::SegmentId& id, const std::shared_ptr<WorkProgress>& progress);
  // Puts the running segment behind those that wait; false when none does.
  bool LetOthersGo(const storage::SegmentId& id);

  const std::string makes_;
  BackgroundPace& pace_;
  const Job job_;
  // The worker's mutex guards these.
  std::deque<storage::SegmentId> queue_;
  std::set<storage::SegmentId> queued_;  // what queue_ holds
  std::map<storage::SegmentId, Entry> entries_;
  std::optional<storage::SegmentId> running_;
  Worker worker_;
};

}  // namespace prefixd
