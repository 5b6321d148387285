// Checks a store's options, and translates them for storage/.
//
// Thread-safety: a free function; concurrent calls are fine.
#pragma once

#include "prefixd/options.h"
#include "prefixd/result.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

// Translates everything but the hook for pinning. kInvalidArgument names the wrong option and its
// bounds.
Result<storage::StoreOptions> StorageOptions(const RuntimeOptions& options);

}  // namespace prefixd
