// Bundles what the sessions of one store share.
//
// Thread-safety: all members may be used concurrently; the store owns what they refer to.
#pragma once

#include <atomic>
#include <cstdint>

#include "prefixd/options.h"
#include "runtime/prefix/prefetcher.h"
#include "runtime/rates/measured_rates.h"
#include "runtime/step/step_engine.h"
#include "runtime/work/scratch.h"
#include "runtime/work/thread_pool.h"

namespace prefixd {

struct SessionServices {
  const RuntimeOptions& options;
  StepEngine& steps;
  ThreadPool& pool;
  ScratchPool& scratch;
  Prefetcher& prefetcher;
  MeasuredRates& rates;
  std::atomic<uint64_t> open{0}, attached{0}, stepped{0};  // now; since the start; steps
};

}  // namespace prefixd
