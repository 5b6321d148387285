// Runs steps of several sessions together, on the store's compute threads.
#pragma once

#include <span>

#include "prefixd/store.h"
#include "runtime/session/session_services.h"

namespace prefixd {

// Implements Store::StepBatch for the local store with these services. Calls of several threads
// that wait for the same cores are joined.
void StepBatch(SessionServices& services, std::span<StepRequest> requests);

}  // namespace prefixd
