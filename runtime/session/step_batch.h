// Steps that run together, over the store's compute threads.
#pragma once

#include <span>

#include "prefixd/store.h"

namespace prefixd {

// Store::StepBatch of a local store. All sessions must belong to one; calls of several threads that
// wait for the same cores are joined.
void StepBatch(std::span<StepRequest> requests);

}  // namespace prefixd
