// Where what is derived of segments is read, made and kept.
//
// Thread-safety: what it refers to may be used by several threads at once, and outlives it.
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
