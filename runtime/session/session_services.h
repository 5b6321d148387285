// Bundles what the sessions of one store share.
//
// Thread-safety: all members may be used concurrently; the store owns what they refer to.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "prefixd/attach.h"
#include "prefixd/options.h"
#include "prefixd/put.h"
#include "prefixd/result.h"
#include "prefixd/session.h"
#include "runtime/prefix/prefetcher.h"
#include "runtime/rates/measured_rates.h"
#include "runtime/step/step_engine.h"
#include "runtime/work/scratch.h"
#include "runtime/work/thread_pool.h"

namespace prefixd {

class PutStream;

// What sessions ask of the store that they belong to, as Store has it. It is open while any of them
// exists.
struct SessionStore {
  std::function<Result<std::unique_ptr<PutStream>>(const PutSpec&)> begin_put;
  std::function<Result<std::shared_ptr<Session>>(const AttachSpec&)> attach;
};

struct SessionServices {
  const RuntimeOptions& options;
  StepEngine& steps;
  ThreadPool& pool;
  ScratchPool& scratch;
  Prefetcher& prefetcher;
  MeasuredRates& rates;
  SessionStore store = {};                                 // set before the first session attaches
  std::atomic<uint64_t> open{0}, attached{0}, stepped{0};  // now; since the start; steps
};

}  // namespace prefixd
