// Compresses a prefix on request: plans, measures, and rewrites its last segment.
//
// Thread-safety: a free function, any thread; it may run beside the background's rewriting.
#pragma once

#include <string_view>

#include "prefixd/compress.h"
#include "prefixd/progress.h"
#include "prefixd/result.h"
#include "runtime/store/core.h"

namespace prefixd {

Result<CompressReport> CompressPrefix(Core& core, std::string_view prefix, const CompressSpec& spec,
                                      const ProgressFn& progress);

}  // namespace prefixd
