// Refuses policies that make no sense, with a sentence.
//
// Thread-safety: pure functions.
#pragma once

#include "prefixd/head_index.h"
#include "prefixd/options.h"
#include "prefixd/policy.h"
#include "prefixd/result.h"

namespace prefixd {

// kInvalidArgument: a field out of range, or two that exclude each other; kFailedPrecondition: rows
// are to be prefetched and the store has no host tier.
Status CheckPolicy(const RuntimeOptions& options, const StepPolicy& policy);
// kInvalidArgument: `fixed` names heads that the model has not, or more than it has.
Status CheckFixed(const StepPolicy& policy, const HeadIndex& heads);

}  // namespace prefixd
