// Replays requests against a model of a store: segments that continue each other, as puts make
// them, and the store's own choice of what goes. Where cache_model.h counts in blocks, this counts
// as a store does, so that a store that is run on the same requests can be held to it.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>

#include "measure/capacity/cache_model.h"
#include "measure/capacity/request_log.h"

namespace prefixd::bench {

struct StoreShape {
  double token_bytes = 0;    // on the disk, for each token of a segment
  double segment_bytes = 0;  // and for each segment
  uint64_t quota_bytes = 0;  // 0: none
};

// Each request restores what is stored of its prompt, which is one use, and puts the prompt, which
// is another one. peak_tokens stays 0.
CacheHits ReplayInModel(const RequestLog& log, const StoreShape& shape);

}  // namespace prefixd::bench
