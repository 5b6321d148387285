// Declares the module's classes, and the functions of other files that bind them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <mutex>
#include <utility>

#include "prefixd/client.h"
#include "prefixd/restore.h"
#include "python/core/arrays.h"
#include "python/core/ending.h"

namespace prefixd::python {

using Unlocked = nb::call_guard<nb::gil_scoped_release>;

struct PyPut {
  Ending<std::shared_ptr<Store>> store;
  Ending<std::unique_ptr<PutStream>> put;
  DType dtype;

  PutStream& open() const {
    if (put) return *put;
    throw Failure{{Code::kFailedPrecondition, "this put was committed or aborted already"}};
  }
};

// Releases its store on detach, so that an embedded one can be opened again.
struct PySession {
  Ending<std::shared_ptr<Store>> store;
  Ending<std::shared_ptr<Session>> session;

  // The caller holds the interpreter's lock, because another thread may detach meanwhile.
  std::shared_ptr<Session> get() const {
    if (session) return session;
    throw Failure{{Code::kFailedPrecondition, "the session was detached; attach again"}};
  }
};

// Holds one run at a time: Next takes it, Copy returns its rows.
struct PyRestore {
  Ending<std::shared_ptr<Store>> store;
  Ending<std::unique_ptr<Restore>> restore;
  DType dtype;
  KvOrder order;
  uint32_t restore_end;  // behind the last token
  RestoredRun run{};
};

struct PyPendingMatch {
  std::shared_ptr<PendingMatch> match;
};

using PyStore = std::shared_ptr<Store>;
class StoreHandle {
 public:
  explicit StoreHandle(PyStore store) : store_(std::move(store)) {}

  PyStore get() const {
    std::lock_guard lock(*mutex_);
    if (store_) return store_;
    throw Failure{{Code::kFailedPrecondition, "this store is closed"}};
  }
  PyStore Take() {
    std::lock_guard lock(*mutex_);
    return std::exchange(store_, nullptr).get();
  }

 private:
  std::unique_ptr<std::mutex> mutex_ = std::make_unique<std::mutex>();  // a pointer can be moved
  Ending<PyStore> store_;
};

void BindAttached(nb::module_& m);   // AttachedBatch, attend_paged, read_policy
void BindDeadline(nb::module_& m);   // Deadline
void BindStore(nb::module_& m);      // Store, open, connect
void BindPaged(nb::module_& m);      // PagedRows
void BindPut(nb::module_& m);        // Put
void BindRestore(nb::module_& m);    // Restore
void BindSession(nb::module_& m);    // Session, step_batch
void BindOwnTokens(nb::module_& m);  // merge_own_tokens

}  // namespace prefixd::python
