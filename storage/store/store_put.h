// Begins and carries out puts of one store. Any thread; one put belongs to one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>

#include "storage/core/store_core.h"
#include "storage/store/prefix_store.h"

namespace prefixd::storage {

// Implements PrefixStore::BeginPut.
Result<std::unique_ptr<SegmentWriter>> BeginPut(std::shared_ptr<StoreCore> core,
                                                std::string_view model, std::string_view tenant,
                                                std::span<const uint32_t> tokens,
                                                std::string_view label, const PutOptions& options);

}  // namespace prefixd::storage
