// Computes the steps of all sessions of a store: queues them, spreads them over the compute
// threads, and attends.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "prefixd/ledger.h"
#include "runtime/step/compute.h"
#include "runtime/step/gathered_rows.h"
#include "runtime/step/step.h"
#include "runtime/step/step_queue.h"
#include "runtime/work/scratch.h"
#include "runtime/work/thread_pool.h"

namespace prefixd {

class StepEngine {
 public:
  // pool and scratch outlive it. gathered_rows_bytes: bound on the copies of rows that steps share.
  StepEngine(std::unique_ptr<Compute> compute, ThreadPool& pool, ScratchPool& scratch,
             uint64_t gathered_rows_bytes, const std::shared_ptr<MemoryBudget>& memory = {});

  // Returns when the call's tasks are done; each task has its own status.
  void Run(StepQueue::Call& call) { queue_.Run(call); }

  const Compute& compute() const { return *compute_; }
  const GatheredRowCache& gathered_rows() const { return gathered_rows_; }
  const StepQueue& queue() const { return queue_; }

 private:
  void RunTasks(std::span<GroupTask*> tasks, StepQueue::Service& service);

  const std::unique_ptr<Compute> compute_;
  ThreadPool& pool_;
  GatheredRowCache gathered_rows_;
  const StepParts parts_;
  StepQueue queue_;
};

}  // namespace prefixd
