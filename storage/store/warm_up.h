// Reads rows of the prefixes used last into the host tier behind a start, so that who asks for them
// finds them in memory, as before it. Takes free room alone, behind all other reads.
#pragma once

#include "storage/core/store_core.h"
#include "storage/store/prefix_store.h"

namespace prefixd::storage {

// Implements PrefixStore::WarmUp.
Result<WarmedUp> WarmUp(StoreCore& core, const WarmUpOptions& options);

}  // namespace prefixd::storage
