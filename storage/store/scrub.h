// Verification in the background: every segment with its blobs, the one that was verified longest
// ago first, at a bounded rate and behind all other I/O. When each was last verified, and where the
// scrub stands inside the one under way, are rows of the catalog, so that a restart loses nothing.
// Nothing is pinned: segments may be removed, rewritten or merged under it.
#pragma once

#include <cstdint>

#include "storage/store/prefix_store.h"
#include "storage/store/store_core.h"

namespace prefixd::storage {

// PrefixStore::Scrub.
Result<int64_t> ScrubStore(StoreCore& core, const ScrubOptions& options);

}  // namespace prefixd::storage
