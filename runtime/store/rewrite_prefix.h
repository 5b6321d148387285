// Rewrites what a prefix needs, on request.
//
// Thread-safety: a free function, any thread; it may run beside the background's rewriting.
#pragma once

#include <string_view>

#include "prefixd/progress.h"
#include "prefixd/result.h"
#include "prefixd/rewrite.h"
#include "runtime/store/core.h"

namespace prefixd {

Result<RewriteResult> RewritePrefix(Core& core, std::string_view prefix, RewriteKind kind,
                                    const ProgressFn& progress);

}  // namespace prefixd
