// Replays requests against a cache of blocks, to count what it hits. A block is stored only
// together with all before it, and only blocks that nothing stored continues may go, as in a store.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>
#include <set>
#include <unordered_map>
#include <utility>

#include "measure/capacity/request_log.h"

namespace prefixd::bench {

enum class Eviction {
  kOldest,  // the least recently used block goes first
  kScore,   // the one with the least eviction score, as a store's (storage/catalog/eviction.h)
};

struct CacheHits {
  uint64_t requests = 0, requests_hit = 0;
  uint64_t input_tokens = 0, hit_tokens = 0;
  uint64_t stored_tokens = 0;    // written; a block that comes back is written again
  uint64_t distinct_tokens = 0;  // stored for the first time
  uint64_t peak_blocks = 0;
  double hit_share() const {
    return input_tokens ? double(hit_tokens) / double(input_tokens) : 0.0;
  }
  // How often a token that was written was hit afterwards.
  double reuse() const { return stored_tokens ? double(hit_tokens) / double(stored_tokens) : 0.0; }
};

// `capacity_blocks` 0: without bound. The last token of a prompt is always computed, as engines do.
CacheHits ReplayRequests(const RequestLog& log, uint64_t capacity_blocks, Eviction eviction);

}  // namespace prefixd::bench
