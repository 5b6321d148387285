#pragma once

#include <memory>

#include "storage/store/prefix_store.h"
#include "storage/store/store_core.h"

namespace prefixd::storage {

// Does what PrefixStore::Open does, with a wrapped engine.
Result<std::unique_ptr<PrefixStore>> OpenStoreWithEngine(const StoreOptions& options,
                                                         const EngineWrapper& wrap);

}  // namespace prefixd::storage
