// Replays requests in a store of their own, with quota and eviction: each request restores what is
// stored of its prompt, as an engine would, and puts the prompt. Uses grow old by the log's time
// and not by the clock, so that an hour of requests takes minutes and evicts as in an hour.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>

#include "measure/capacity/cache_model.h"
#include "measure/capacity/request_log.h"
#include "measure/capacity/store_model.h"
#include "prefixd/result.h"
#include "prefixd/store.h"

namespace prefixd {
class LocalStore;
}

namespace prefixd::bench {

struct ReplayOptions {
  std::filesystem::path dir;  // empty or absent; the store stays in it
  uint64_t quota_bytes = 0;
  bool compact = true;  // chains of small segments are rewritten, as by default
  // What requests go to instead of the store itself, such as a connection to a daemon that has it.
  std::function<Result<std::shared_ptr<Store>>(std::unique_ptr<LocalStore>)> serve;
  std::function<void(uint64_t done, uint64_t all)> progress;
};

struct ReplayOutcome {
  CacheHits hits;              // peak_tokens stays 0
  double seconds = 0;          // of the run
  uint64_t segments = 0;       // stored at the end
  uint64_t stored_bytes = 0;   // by them
  uint64_t evictions = 0;      // segments
  uint64_t row_bytes = 0;      // of tokens that were put
  uint64_t written_bytes = 0;  // segments and what is made of them, as the store counts
  uint64_t disk_bytes = 0;     // written to the disk by this process, the catalogue included
  uint64_t refused = 0;        // puts that found no room
};

// Bytes of a token's rows: one layer and one head of 16, bf16.
inline constexpr uint32_t kReplayRowBytes = 64;

// Restored rows are compared with what was put: kCorrupt.
Result<ReplayOutcome> ReplayInStore(const RequestLog& log, const ReplayOptions& options);

// What a segment takes in such a store, by two that are put into one in `dir`; the quota is left 0.
Result<StoreShape> MeasureStoreShape(const std::filesystem::path& dir);

}  // namespace prefixd::bench
