// Takes up what an earlier process left undone: finds the segments that lack derived data and
// queues them, while the store serves already. Each takes a small file to be read, and there may be
// a hundred thousand.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "prefixd/progress.h"
#include "prefixd/result.h"
#include "runtime/work/worker.h"
#include "storage/segment/prefix_info.h"

namespace prefixd {

struct Core;

class Resumption {
 public:
  // Begins at once. core: its queues are there; must outlive this.
  explicit Resumption(Core& core);

  // Looks at segments that nobody has looked at yet before their turn comes, so that the ingest
  // knows how they stand.
  void LookAt(std::span<const storage::SegmentId> segments);
  // Looks again at all of a model's segments, whose derived data depend on what has changed.
  // Returns when it has, or the call may last no longer: then all the rest is queued unseen.
  void LookAgain(const std::string& model);

  // Runs `remove` while nobody here looks at the segment: a look opens it for a moment, and what is
  // open cannot be removed. Waits for a look that is under way, as long as the call may last.
  Status Undisturbed(const storage::SegmentId& segment, const std::function<Status()>& remove);

  // Segments that nobody has looked at yet, about.
  uint64_t left() const;
  // Returns when all have been looked at. kCancelled when `progress` returns false.
  Status Wait(const ProgressFn& progress);
  void Stop() { worker_.Stop(); }

 private:
  // In an order in which parents come first; `only_model`: of this model alone.
  std::vector<storage::SegmentId> Segments(const std::string* only_model) const;
  // Queues those of the segments that lack something.
  void Look(std::span<const storage::SegmentId> segments);
  void LookAtSome(std::span<const storage::SegmentId> segments);
  void LookAtAll(const std::stop_token& stop);

  Core& core_;
  // The worker's mutex guards these.
  bool begun_ = false, done_ = false;
  uint64_t left_ = 0;
  std::list<std::vector<storage::SegmentId>> looked_at_;  // just now
  std::multiset<storage::SegmentId> removed_;             // just now: nobody begins to look at them
  Worker worker_;
};

}  // namespace prefixd
