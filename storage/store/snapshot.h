// Keeps a store's files as they are at one moment, in the directory snapshot/ of the store.
// Internal to storage/store.
//
// Thread-safety: free functions, any thread.
#pragma once

#include <memory>

#include "prefixd/result.h"
#include "prefixd/snapshot.h"
#include "storage/core/store_core.h"

namespace prefixd::storage {

// Commits wait while the catalog is copied and the segment files are linked.
Result<std::unique_ptr<Snapshot>> TakeSnapshot(const std::shared_ptr<StoreCore>& core);
// Removes what a process that died left. REQUIRES the store's lock.
Status RemoveOldSnapshot(const std::filesystem::path& store_dir);

}  // namespace prefixd::storage
