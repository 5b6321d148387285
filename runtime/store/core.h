// The shared state behind Store, Session and PutStream. Whoever holds it keeps the store's
// directory open.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>

#include "prefixd/options.h"
#include "runtime/step/compute.h"
#include "runtime/prefix/head_loads.h"
#include "runtime/store/host_pinning.h"
#include "runtime/background/maintenance.h"
#include "runtime/prefix/models.h"
#include "runtime/prefix/prepared_cache.h"
#include "runtime/prefix/rows_ahead.h"
#include "runtime/step/scratch.h"
#include "runtime/background/scrubber.h"
#include "runtime/background/segment_queue.h"
#include "runtime/prefix/selector_memory.h"
#include "runtime/step/set_rows.h"
#include "runtime/step/step_batch.h"
#include "runtime/step/step_queue.h"
#include "runtime/derived/summaries.h"
#include "runtime/background/thread_pool.h"
#include "storage/store/prefix_store.h"

namespace prefixd {

struct Core {
  Core(const RuntimeOptions& o, std::unique_ptr<storage::PrefixStore> s, std::unique_ptr<Compute> c)
      : options(o),
        storage(std::move(s)),
        compute(std::move(c)),
        pool(o.threads),
        models(storage.get()),
        selector_memory(o.selector_memory_bytes),
        set_rows(o.shared_rows_bytes),
        index_loads(WorkPriority::kStep,
                    [](PreparedPrefix& prefix, index::IndexKind kind, size_t head,
                       const std::atomic<bool>&) { return prefix.LoadIndexAhead(head, kind); }),
        key_loads(WorkPriority::kBackground,
                  [](PreparedPrefix& prefix, index::IndexKind, size_t head,
                     const std::atomic<bool>& stop) { return prefix.LoadKeysAhead(head, stop); }),
        rooms{&options,
              storage.get(),
              &pool,
              &scratch,
              &selector_memory,
              &set_rows,
              &index_loads,
              &key_loads,
              &rows_ahead,
              [this](const storage::SegmentId& id) { Rebuild(id); }},
        prepared(selector_memory),
        step_queue(pool.threads(),
                   [this](std::span<GroupTask* const> tasks, const StepQueue::Note& task_done) {
                     RunTasks(*this, tasks, task_done);
                   }) {}

  // Derived data of the segment are made again, in the background.
  void Rebuild(const storage::SegmentId& id);

  const RuntimeOptions options;
  const std::unique_ptr<storage::PrefixStore> storage;
  const std::unique_ptr<Compute> compute;
  ThreadPool pool;
  ScratchPool scratch;
  ModelRegistry models;
  SelectorMemory selector_memory;
  SetRowsPool set_rows;
  HeadLoads index_loads, key_loads;
  RowsAhead rows_ahead;
  const Rooms rooms;
  PreparedCache prepared;
  StepQueue step_queue;

  std::shared_ptr<HostPinning> pinning;  // null: not asked for
  std::atomic<uint64_t> sessions{0}, sessions_total{0}, steps{0};
  const std::chrono::steady_clock::time_point started = std::chrono::steady_clock::now();

  // Last: their threads use all the others. Rewriting begins when the ingest of a segment is done.
  std::unique_ptr<SegmentQueue> ingest, rewrites;
  std::unique_ptr<Maintenance> maintenance;
  std::unique_ptr<Scrubber> scrubber;
};

}  // namespace prefixd
