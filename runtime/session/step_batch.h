// Runs steps of several sessions together, on the store's compute threads.
#pragma once

#include <span>

#include "prefixd/store.h"

namespace prefixd {

// Implements Store::StepBatch for a local store. All sessions must belong to one store. Calls of
// several threads that wait for the same cores are joined.
void StepBatch(std::span<StepRequest> requests);

}  // namespace prefixd
