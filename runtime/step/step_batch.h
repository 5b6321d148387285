// Steps that run together, over the store's compute threads.
#pragma once

#include <span>

#include "prefixd/store.h"
#include "runtime/step/step.h"
#include "runtime/step/step_queue.h"

namespace prefixd {

struct Core;

// task_done: called once for each task when it is done, from any thread.
void RunTasks(Core& core, std::span<GroupTask* const> tasks, const StepQueue::Note& task_done);

// Store::StepBatch of a local store. All sessions must belong to one; calls of several threads that
// wait for the same cores are joined.
void StepBatch(std::span<StepRequest> requests);

}  // namespace prefixd
