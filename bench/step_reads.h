// What a step's row reads cost with nothing, half and all of the rows in the host tier; and what
// reading near pages together brings.
#pragma once

#include <map>
#include <string>

#include "bench/storage_speed.h"

namespace prefixd::bench {

// By part: "step_cold", "step_half", "step_full" (rows of random tokens, 1% of the prompt for every
// KV head, each step another set; beside fio's random reads, or memcpy of as many rows from random
// places), "scrubbed" and "verified" (layers of such reads from the disk, in bursts as steps have
// them, while the background's scrub runs at its usual rate, or a verification as fast as it can,
// beside the same without), and "gap" (rows of pages with as many others between them as the
// store reads over, beside the same reads one by one). Only what options.parts names. Leaves `dir`
// empty.
Result<std::map<std::string, Paired>> MeasureStepReads(const Prompt& prompt,
                                                       const SpeedOptions& options,
                                                       const std::string& fio_engine);

}  // namespace prefixd::bench
