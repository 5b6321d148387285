// Measures exact attention and the step given its set, against the number of stored tokens.
#pragma once

#include "bench/attention/layers.h"
#include "bench/attention/report.h"

namespace prefixd::bench {

// Appends to `report`; lengths beyond the memory are left out.
void MeasureLengths(Team& team, const RowMemory& memory, int rounds, Report& report);

// Measures what completion adds to a step over 128k tokens.
void MeasureCompletion(Team& team, const RowMemory& memory, int rounds, Report& report);

}  // namespace prefixd::bench
