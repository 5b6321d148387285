// What steps over a prefix will want, loaded before they ask: head by head, in a thread of its own.
//
// Thread-safety: all methods may be called concurrently; Stop ends the work promptly.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <list>

#include "index/search/key_index.h"
#include "prefixd/result.h"
#include "runtime/work/worker.h"

namespace prefixd {

class PreparedPrefix;

class HeadLoads {
 public:
  // Loads one head's part. `stop`: it is not wanted any more, and the result does not matter.
  using Load = std::function<Status(PreparedPrefix&, index::IndexKind, size_t head,
                                    const std::atomic<bool>& stop)>;

  // priority: of the thread. A step may wait for what kStep loads.
  HeadLoads(WorkPriority priority, Load load);
  ~HeadLoads() { Stop(); }
  HeadLoads(const HeadLoads&) = delete;
  HeadLoads& operator=(const HeadLoads&) = delete;

  // All heads of `prefix`, in order, unless they were wanted before. An error ends it: the step
  // that needs what is missing meets it itself.
  void Want(PreparedPrefix& prefix, index::IndexKind kind);
  // Returns when the thread has let go of `prefix`, which nobody may want from now on.
  void Forget(const PreparedPrefix& prefix);
  void Stop();
  // Whether this head's part is on its way.
  bool Loads(const PreparedPrefix& prefix, size_t head) const;
  uint64_t queued() const;  // heads to be loaded, and the one under way

 private:
  struct Entry {
    PreparedPrefix* prefix;
    index::IndexKind kind;
    size_t next = 0;  // head; past the last: done, and kept so as not to begin again
  };

  Worker::Next Take();
  void Run(const Entry& now);

  const Load load_;
  // By the worker's mutex.
  std::list<Entry> entries_;
  const PreparedPrefix* running_ = nullptr;
  std::atomic<bool> stop_{false};  // what runs
  bool closed_ = false;
  Worker worker_;
};

}  // namespace prefixd
