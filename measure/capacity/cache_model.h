// Replays requests against a cache of blocks, to count what it hits. A block is stored only
// together with all before it, and only blocks that nothing stored continues may go, as in a store.
// Room is counted in tokens, as a store counts it: a prompt's last block may be short.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>

#include "measure/capacity/request_log.h"

namespace prefixd::bench {

enum class Eviction {
  kLru,     // the least recently used block goes first
  kLfu,     // the one with the fewest uses since it was stored; of these the least recently used
  kGdsf,    // Greedy-Dual-Size-Frequency: uses, and the priority of what went last when it was used
  kS3Fifo,  // a small queue before the main one, and a memory of what left the small one
  kScore,   // the one with the least eviction score, as a store's (storage/catalog/eviction.h)
};
inline constexpr Eviction kPolicies[] = {Eviction::kLru, Eviction::kLfu, Eviction::kGdsf,
                                         Eviction::kS3Fifo, Eviction::kScore};
const char* PolicyName(Eviction eviction);  // "LRU", ..., "eviction score"

struct CacheHits {
  uint64_t requests = 0, requests_hit = 0;
  uint64_t input_tokens = 0, hit_tokens = 0;
  double hit_squares = 0;        // each request's hit tokens, squared: attention grows like that
  uint64_t stored_tokens = 0;    // written; a block that comes back is written again
  uint64_t distinct_tokens = 0;  // stored for the first time
  uint64_t peak_tokens = 0;      // held at a time, at most
  void Hit(uint64_t tokens) {    // of one request
    hit_tokens += tokens;
    hit_squares += double(tokens) * double(tokens);
  }
  double hit_share() const {
    return input_tokens ? double(hit_tokens) / double(input_tokens) : 0.0;
  }
  // How often a token that was written was hit afterwards.
  double reuse() const { return stored_tokens ? double(hit_tokens) / double(stored_tokens) : 0.0; }
};

// What a prompt is spared of which so many tokens are stored: its last one is always computed, as
// engines do.
uint64_t HitTokens(const Request& request, uint64_t matched);

// `capacity_tokens` 0: without bound.
CacheHits ReplayRequests(const RequestLog& log, uint64_t capacity_tokens, Eviction eviction);

}  // namespace prefixd::bench
