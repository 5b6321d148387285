// Reports what a store holds and does, in the types of the public interface.
//
// Thread-safety: these functions may be called concurrently with everything else.
#pragma once

#include "prefixd/prefix_summary.h"
#include "prefixd/runtime_stats.h"
#include "runtime/store/core.h"

namespace prefixd {

PrefixSummary SummaryOf(const Core& core, const storage::PrefixInfo& info);
RuntimeStats StatsOf(const Core& core);

}  // namespace prefixd
