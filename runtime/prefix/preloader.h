// Preloads keys or indexes that the coming steps over a prefix will need, head by head, in its own
// thread.
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

class Preloader {
 public:
  // Loads one head's part. Once `stop` is set the load should end; its result does not matter.
  using Load = std::function<Status(PreparedPrefix&, index::IndexKind, size_t head,
                                    const std::atomic<bool>& stop)>;

  // priority: the thread's. A step may wait for a kStep load.
  Preloader(WorkPriority priority, Load load);
  ~Preloader() { Stop(); }
  Preloader(const Preloader&) = delete;
  Preloader& operator=(const Preloader&) = delete;

  // Queues all heads of `prefix`, in order, unless they were queued before. An error ends
  // preloading for the prefix; the step that needs the missing part reports the error.
  void Want(PreparedPrefix& prefix, index::IndexKind kind);
  // Returns when the thread has let go of `prefix`. No caller may use Want with it any more.
  void Forget(const PreparedPrefix& prefix);
  void Stop();
  // Whether this head's part is queued or loading.
  bool Loads(const PreparedPrefix& prefix, size_t head) const;
  uint64_t queued() const;  // heads queued, and the one loading

 private:
  struct Entry {
    PreparedPrefix* prefix;
    index::IndexKind kind;
    size_t next = 0;  // next head; past the last: done, and not to restart
  };

  Worker::Next Take();
  void Run(const Entry& now);

  const Load load_;
  // The worker's mutex guards these.
  std::list<Entry> entries_;
  const PreparedPrefix* running_ = nullptr;
  std::atomic<bool> stop_{false};  // stops the running load
  bool closed_ = false;
  Worker worker_;
};

}  // namespace prefixd
