// Runs exact passes: of a question's tokens over the whole prefix, and steps in mode full.
#pragma once

#include "prefixd/result.h"
#include "runtime/step/step.h"

namespace prefixd {

// Whether a task attends to every token of its prefix.
bool IsExact(const GroupTask& task);

// Runs the pass of such a task, or the part of it that the turn allows; returns whether it has
// ended. Charges what it read, also after an error. Own tokens are not attended (merge_own.h).
// Thread-safety: any number of concurrent calls with different tasks.
Result<bool> RunExactPass(const StepParts& parts, GroupTask& task, StepTurn& turn);

}  // namespace prefixd
