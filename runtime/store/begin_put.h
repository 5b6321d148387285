// Begins puts into an open store.
//
// Thread-safety: these functions may be called concurrently with everything else.
#pragma once

#include <cstdint>
#include <memory>

#include "prefixd/put.h"
#include "prefixd/result.h"
#include "prefixd/store.h"
#include "runtime/store/core.h"

namespace prefixd {

// kInvalidArgument: longer than a prefix may live.
Status CheckTtl(uint64_t ttl_seconds);

// Implements Store::BeginPut; the put keeps the core alive. live: it stores own tokens that a
// session moves (storage::PutOptions::live).
Result<std::unique_ptr<PutStream>> BeginStorePut(const std::shared_ptr<Core>& core,
                                                 const PutSpec& spec, bool live = false);

}  // namespace prefixd
