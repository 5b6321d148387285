// Bundles the services that make, read and keep the derived data of segments.
//
// Thread-safety: several threads may use the members at once; the members outlive the context.
#pragma once

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
};

}  // namespace prefixd
