// Runs the put of one prompt: checks rows, interleaves keys with values, keeps a sample of queries.
#pragma once

#include <functional>
#include <memory>

#include "base/memory_budget.h"
#include "prefixd/store.h"
#include "runtime/work/thread_pool.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

struct PutContext {
  std::shared_ptr<void> keep_alive;  // the store's shared state
  storage::PrefixStore* storage = nullptr;
  ThreadPool* pool = nullptr;
  KvGeometry geometry;
  uint32_t prompt_tokens = 0;
  uint32_t query_samples = 0;
  uint64_t fixed_bytes = 0;  // of `memory`: what the samples take
  MemoryCharge memory;
  // Called when the segment is committed and its query samples are stored.
  std::function<void(const storage::SegmentId&)> committed;
};

std::unique_ptr<PutStream> MakePutStream(PutContext context,
                                         std::unique_ptr<storage::SegmentWriter> writer);

}  // namespace prefixd
