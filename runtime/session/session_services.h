// Bundles what the sessions of one store share.
//
// Thread-safety: all members may be used concurrently; the store owns what they refer to.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "base/opened_here.h"
#include "prefixd/attach.h"
#include "prefixd/options.h"
#include "prefixd/progress.h"
#include "prefixd/put.h"
#include "prefixd/result.h"
#include "prefixd/session.h"
#include "runtime/prefix/prefetcher.h"
#include "runtime/prefix/prepared_prefix.h"
#include "runtime/rates/measured_rates.h"
#include "runtime/retention/scorer_shelf.h"
#include "runtime/step/step_engine.h"
#include "runtime/work/scratch.h"
#include "runtime/work/thread_pool.h"
#include "storage/segment/prefix_info.h"

namespace prefixd {

class OwnMover;
class PutStream;

// What sessions ask of the store that they belong to, as Store has it. It is open while any of them
// exists.
struct SessionStore {
  std::function<Result<std::unique_ptr<PutStream>>(const PutSpec&)> begin_put;
  std::function<Result<std::shared_ptr<Session>>(const AttachSpec&)> attach;
  // Of own tokens that sessions move: a put that nobody else sees, whose ids are not in use; a wait
  // for what is derived of it (kCancelled when told is false); its end.
  std::function<Result<std::unique_ptr<PutStream>>(const PutSpec&)> begin_live_put;
  std::function<Status(const storage::SegmentId&, const ProgressFn& told)> wait_ready;
  // Has what is derived of a chain made, where nothing has asked for it: a session reads by it.
  std::function<void(std::span<const storage::SegmentId>)> derive;
  // Opens a prefix that ends in this segment.
  std::function<Result<std::shared_ptr<PreparedPrefix>>(
      const std::shared_ptr<const Model>&, const storage::SegmentId&, uint32_t n_tokens)>
      prepare;
};

struct SessionServices {
  const RuntimeOptions& options;
  StepEngine& steps;
  ThreadPool& pool;
  ScratchPool& scratch;
  Prefetcher& prefetcher;
  MeasuredRates& rates;
  SessionStore store = {};            // set before the first session attaches
  OwnMover* mover = nullptr;          // likewise
  ScorerShelf* scorers = nullptr;     // likewise
  std::atomic<uint32_t> live_ids{0};  // the next id of a moved token, from a random one on
  std::atomic<uint64_t> open{0}, attached{0}, stepped{0};  // now; since the start; steps
  OpenedHere opened = {};  // a child of fork() has none of the threads
};

}  // namespace prefixd
