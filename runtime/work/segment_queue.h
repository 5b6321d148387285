// A background thread with one kind of work per segment, and where each segment stands in it. A
// store has two: the ingest, which derives what lies beside a segment, and the rewriting.
//
// Thread-safety: all methods may be called concurrently; Stop ends the work promptly.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "prefixd/result.h"
#include "prefixd/types.h"
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

  // makes: what comes of the job, for messages ("summaries").
  SegmentQueue(std::string makes, Job job);
  ~SegmentQueue() { Stop(); }

  // Segments are done in order of arrival: parents before children.
  void Enqueue(const storage::SegmentId& id);
  // Enqueue, unless the segment is known: waiting for one that a concurrent put just committed.
  void EnqueueUnknown(const storage::SegmentId& id);
  void MarkReady(const storage::SegmentId& id);
  Standing Get(const storage::SegmentId& id) const;
  // Waits for all of `chain`. kCancelled when `progress` returns false or the queue stops;
  // kNotFound when one of them was taken out meanwhile; the job's own error, naming the segment,
  // when it failed.
  Status Wait(std::span<const storage::SegmentId> chain, const ProgressFn& progress);
  // Waits until nothing is queued or running. kCancelled as Wait.
  Status WaitIdle(const ProgressFn& progress);
  // Takes a segment out, stopping its work if it is under way, and forgets it.
  void Forget(const storage::SegmentId& id);
  // Drops what is known of segments that are not stored any more; not the one being worked on.
  void Prune(const std::function<bool(const storage::SegmentId&)>& stored);
  // Stops the work between two heads; what is not done stays for the next start of the store.
  void Stop();
  uint64_t queued() const;

 private:
  struct Entry {
    Standing standing;
    std::shared_ptr<WorkProgress> progress;  // of the run under way, or of the last one
  };

  Worker::Next Take();
  void Run(const storage::SegmentId& id, const std::shared_ptr<WorkProgress>& progress);

  const std::string makes_;
  const Job job_;
  // By the worker's mutex.
  std::deque<storage::SegmentId> queue_;
  std::map<storage::SegmentId, Entry> entries_;
  std::optional<storage::SegmentId> running_;
  Worker worker_;
};

}  // namespace prefixd
