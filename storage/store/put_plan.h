// Decides what a put stores: which tokens are missing, and which segment they continue.
//
// Thread-safety: PlanPut may be called concurrently; plans are plain values.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/result.h"
#include "storage/core/open_puts.h"
#include "storage/core/store_core.h"
#include "storage/store/store_put.h"

namespace prefixd::storage {

// A PutPlan describes a put; it is fixed at BeginPut.
struct PutPlan {
  RequestScope scope;
  std::vector<uint32_t> tokens;  // the whole prompt
  std::vector<BlockHash> hashes;
  std::string label;
  PutOptions options;
  Lineage lineage{};  // of the rows that this put stores
  Match match;
  ChainPin pin;  // pins the segment that the new one continues
  ModelHold model;
  OpenPuts::Entry open;  // until the put has ended
};

// Waits for a put of the same blocks that is under way, as far as the options say. The errors are
// BeginPut's.
Result<PutPlan> PlanPut(StoreCore& core, std::string_view model, std::string_view tenant,
                        std::span<const uint32_t> tokens, std::string_view label,
                        const PutOptions& options);

}  // namespace prefixd::storage
