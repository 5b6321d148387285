// What a store tells of itself and of what it holds, in the words of the public interface.
//
// Thread-safety: may be called concurrently with everything else.
#pragma once

#include "prefixd/types.h"
#include "runtime/store/core.h"

namespace prefixd {

PrefixSummary SummaryOf(const Core& core, const storage::PrefixInfo& info);
RuntimeStats StatsOf(const Core& core);

}  // namespace prefixd
