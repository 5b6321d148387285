// Opens a stored prefix with all segments of its chain. Any thread; a prefix that several ask for
// is opened once.
#pragma once

#include <cstdint>
#include <memory>

#include "storage/core/store_core.h"
#include "storage/store/stored_prefix.h"

namespace prefixd::storage {

// Implements PrefixStore::OpenPrefix.
Result<std::shared_ptr<const StoredPrefix>> OpenStoredPrefix(std::shared_ptr<StoreCore> core,
                                                             const SegmentId& id,
                                                             uint32_t n_tokens);

}  // namespace prefixd::storage
