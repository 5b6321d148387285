// Measures the row reads of a step with none, half and all of the rows in the host tier, and what
// reading near pages together saves.
#pragma once

#include <map>
#include <string>

#include "measure/disk/storage_speed.h"

namespace prefixd::bench {

// Returns the parts that options.parts names, and leaves `dir` empty.
// "step_cold", "step_half", "step_full": rows of random tokens, 1% of the prompt for every KV head,
// another set in each step; beside fio's random reads, or memcpy of as many rows from random
// places.
// "scrubbed", "verified": layers of such reads from the disk, in bursts as steps make them, while
// the background's scrub runs at its usual rate, or a verification as fast as it can; beside the
// same reads without.
// "gap": rows of pages with as many others between them as the store reads over; beside the same
// reads one by one.
Result<std::map<std::string, Paired>> MeasureStepReads(const Prompt& prompt,
                                                       const SpeedOptions& options,
                                                       const std::string& fio_engine);

}  // namespace prefixd::bench
