// Runs the put of one prompt, or one part of it: checks rows, interleaves keys with values, keeps a
// sample of queries.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "base/memory_budget.h"
#include "base/opened_here.h"
#include "prefixd/store.h"
#include "runtime/ingest/joint_put.h"
#include "runtime/rates/measured_rates.h"
#include "runtime/work/thread_pool.h"

namespace prefixd {

struct PutContext {
  std::shared_ptr<void> keep_alive;  // the store's shared state
  OpenedHere opened;
  ThreadPool* pool = nullptr;
  KvGeometry geometry;      // of the put's heads alone
  uint32_t first_head = 0;  // of the model's KV heads
  uint32_t prompt_tokens = 0;
  uint32_t query_samples = 0;
  uint64_t fixed_bytes = 0;  // of `memory`: what the samples take
  MemoryCharge memory;
  std::chrono::milliseconds wait{0};  // of a commit for the other parts
  MeasuredRates* rates = nullptr;
  std::string tenant, model;
  std::optional<uint32_t> prefill_from;  // as in PutSpec
};

std::unique_ptr<PutStream> MakePutStream(PutContext context, std::unique_ptr<PutPart> writer);

}  // namespace prefixd
