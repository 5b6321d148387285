// Bundles the services that make, read and keep the derived data of segments.
//
// Thread-safety: several threads may use the members at once; the members outlive the context.
#pragma once

#include <memory>
#include <string_view>

#include "base/memory_budget.h"
#include "prefixd/options.h"
#include "runtime/work/scratch.h"
#include "runtime/work/thread_pool.h"
#include "storage/store/segment_source.h"

namespace prefixd {

struct DerivedContext {
  storage::SegmentSource& segments;
  const RuntimeOptions& options;
  ThreadPool& pool;
  ScratchPool& scratch;
  std::shared_ptr<MemoryBudget> memory = nullptr;  // null: nothing is counted

  MemoryAccount MemoryOf(std::string_view tenant) const {
    return memory ? memory->Of(tenant) : MemoryAccount();
  }
};

}  // namespace prefixd
