// Opens a store, recovering what its directory holds. Tests wrap what it works on.
#pragma once

#include <memory>

#include "storage/core/store_core.h"
#include "storage/store/prefix_store.h"

namespace prefixd::storage {

Result<std::shared_ptr<StoreCore>> OpenStoreCore(const StoreOptions& options,
                                                 const EngineWrapper& wrap_engine = nullptr,
                                                 const CatalogWrapper& wrap_catalog = nullptr);

// Does what PrefixStore::Open does, with a wrapped engine.
Result<std::unique_ptr<PrefixStore>> OpenStoreWithEngine(const StoreOptions& options,
                                                         const EngineWrapper& wrap);

}  // namespace prefixd::storage
