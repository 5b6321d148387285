// What a store's options mean to storage/, once they are found sound.
//
// Thread-safety: a free function; concurrent calls are fine.
#pragma once

#include "prefixd/options.h"
#include "prefixd/result.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

// All but the hook for pinning. kInvalidArgument says which option is wrong and what it may be.
Result<storage::StoreOptions> StorageOptions(const RuntimeOptions& options);

}  // namespace prefixd
