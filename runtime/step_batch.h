// Runs the tasks of steps that began together, over the store's compute threads.
#pragma once

#include <span>

#include "runtime/step.h"
#include "runtime/step_queue.h"

namespace prefixd {

struct Core;

// task_done: called once for each task when it is done, from any thread.
void RunTasks(Core& core, std::span<GroupTask* const> tasks, const StepQueue::Note& task_done);

}  // namespace prefixd
