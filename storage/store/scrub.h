// Verifies in the background: every segment with its blobs, the one that was verified longest ago
// first, at a bounded rate and behind all other I/O. The catalog stores when each was last verified
// and the scrub's position inside the current one, so that a restart keeps the progress. The scrub
// pins nothing: segments may be removed, rewritten or compacted under it.
#pragma once

#include <cstdint>

#include "storage/core/store_core.h"
#include "storage/store/prefix_store.h"

namespace prefixd::storage {

// Implements PrefixStore::Scrub.
Result<int64_t> ScrubStore(StoreCore& core, const ScrubOptions& options);

}  // namespace prefixd::storage
