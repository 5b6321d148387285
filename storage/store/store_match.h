// Matches the longest prefix: block hashes find the region, stored token ids decide. It takes no
// lock but those of the tree and the catalog, one at a time.
#pragma once

#include <cstdint>
#include <span>

#include "storage/core/store_core.h"
#include "storage/store/prefix_store.h"

namespace prefixd::storage {

// Returns the longest stored prefix down to the token.
Result<Match> FindLongest(StoreCore& core, const RequestScope& scope,
                          std::span<const BlockHash> hashes, std::span<const uint32_t> tokens,
                          const Acceptance& accept);

// As PrefixStore::HeldRows.
Result<RowsHeld> FindHeldRows(StoreCore& core, const SegmentId& id, TokenRange tokens);

}  // namespace prefixd::storage
