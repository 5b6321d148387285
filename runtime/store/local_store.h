// Opens a store in this process: joins storage, index, attention and gpu. This is all of prefixd;
// the daemon is this library plus a socket.
//
// Thread-safety: that of prefixd/store.h. Destroying the store waits for background work.
#pragma once

#include <functional>
#include <memory>

#include "base/memory_budget.h"
#include "prefixd/options.h"
#include "prefixd/result.h"
#include "prefixd/store.h"

namespace prefixd {

namespace storage {
class PrefixStore;
struct StoreOptions;
}  // namespace storage

class LocalStore : public Store {
 public:
  static Result<std::unique_ptr<LocalStore>> Open(const RuntimeOptions& options);
  // For benchmarks and tests: opens the storage with `open`, over a disk that they make slow or
  // faulty.
  using OpenStorage =
      std::function<Result<std::unique_ptr<storage::PrefixStore>>(const storage::StoreOptions&)>;
  static Result<std::unique_ptr<LocalStore>> Open(const RuntimeOptions& options,
                                                  const OpenStorage& open);

  // Waits until the background has nothing left to rewrite. For benchmarks and tests.
  virtual Status WaitRewritten(const ProgressFn& progress) = 0;
  // What the store takes its memory from; whoever serves it to others does too.
  virtual const std::shared_ptr<MemoryBudget>& memory() const = 0;
};

}  // namespace prefixd
