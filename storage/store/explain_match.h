// Says why a match finds no more tokens than it does. Internal to storage/store.
//
// Thread-safety: a free function, any thread.
#pragma once

#include <cstdint>
#include <span>

#include "storage/core/store_core.h"
#include "storage/store/prefix_store.h"

namespace prefixd::storage {

// Looks at what is stored and was stored for the scope's model and tenant alone.
Result<MatchExplanation> ExplainLongest(StoreCore& core, const RequestScope& scope,
                                        std::span<const uint32_t> tokens, const Acceptance& accept);

}  // namespace prefixd::storage
