// Holds the parts of an open store. Every holder keeps the store's directory open. Internal to
// runtime/store.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "base/memory_budget.h"
#include "prefixd/options.h"
#include "runtime/derived/models.h"
#include "runtime/ingest/joint_put.h"
#include "runtime/prefix/prefetcher.h"
#include "runtime/prefix/preloader.h"
#include "runtime/prefix/prepared_cache.h"
#include "runtime/prefix/selector_memory.h"
#include "runtime/rates/measured_rates.h"
#include "runtime/retention/scorer_shelf.h"
#include "runtime/session/own_mover.h"
#include "runtime/session/session_services.h"
#include "runtime/step/step_engine.h"
#include "runtime/store/host_pinning.h"
#include "runtime/store/resumption.h"
#include "runtime/work/background_pace.h"
#include "runtime/work/maintenance.h"
#include "runtime/work/scratch.h"
#include "runtime/work/scrubber.h"
#include "runtime/work/segment_queue.h"
#include "runtime/work/thread_pool.h"
#include "runtime/work/warm_up.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

struct Core {
  Core(const RuntimeOptions& o, std::shared_ptr<MemoryBudget> m,
       std::unique_ptr<storage::PrefixStore> s, std::unique_ptr<Compute> c)
      : options(o),
        memory(std::move(m)),
        storage(std::move(s)),
        pool(o.threads),
        pace(o.busy_percent, pool.threads()),
        scratch(memory),
        models(storage.get(), {o.max_models, o.max_models_bytes}, memory->Shared()),
        selector_memory(o.selector_memory_bytes),
        scorers(o.scorers, memory->Shared()),
        index_preloader(WorkPriority::kStep,
                        [](PreparedPrefix& prefix, index::IndexKind kind, size_t head,
                           const std::atomic<bool>&) { return prefix.PreloadIndex(head, kind); }),
        key_preloader(WorkPriority::kBackground,
                      [](PreparedPrefix& prefix, index::IndexKind, size_t head,
                         const std::atomic<bool>& stop) { return prefix.PreloadKeys(head, stop); }),
        derived{*storage, options, pool, scratch, memory},
        prepared({derived, selector_memory, index_preloader, key_preloader,
                  [this](const storage::SegmentId& id) { Rebuild(id); }},
                 *storage),
        steps(std::move(c), pool, scratch, o.gathered_rows_bytes, memory),
        services{options, steps, pool, scratch, prefetcher, rates} {}

  // Whether what is derived of the segment is made, or to be made: it is behind each put, unless
  // that is deferred until somebody asks for it.
  bool Derives(const storage::SegmentId& id) const {
    return !options.defer_ingest || ingest->Knows(id);
  }
  // Makes the segment's derived data again, in the background.
  void Rebuild(const storage::SegmentId& id);

  const RuntimeOptions options;
  const std::shared_ptr<MemoryBudget> memory;
  const std::unique_ptr<storage::PrefixStore> storage;
  ThreadPool pool;
  BackgroundPace pace;
  ScratchPool scratch;
  ModelRegistry models;
  SelectorMemory selector_memory;
  ScorerShelf scorers;
  Preloader index_preloader, key_preloader;
  Prefetcher prefetcher;
  const DerivedContext derived;
  PreparedCache prepared;
  StepEngine steps;
  MeasuredRates rates;
  SessionServices services;
  JointPuts joint_puts;
  std::array<std::atomic<uint64_t>, kReuseAdvices> advised{};  // matches, by ReuseAdvice

  std::shared_ptr<HostPinning> pinning;  // null: pinning is off
  const std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();

  // These come last: their threads use all other members. Rewriting begins when the ingest of a
  // segment is done.
  std::unique_ptr<SegmentQueue> ingest, rewrites;
  std::unique_ptr<Maintenance> maintenance;
  std::unique_ptr<Scrubber> scrubber;
  std::unique_ptr<WarmUp> warm_up;  // null: off
  std::unique_ptr<OwnMover> mover;
  std::unique_ptr<Resumption> resumption;
};

}  // namespace prefixd
