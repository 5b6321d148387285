// How long a decoder waits for a stored prompt: attach, and the first completed step, with a store
// that was just opened (cold) and with one that has served the prompt before (warm).
#pragma once

#include <filesystem>

#include "bench/support/bench_prompt.h"
#include "bench/support/statistics.h"

namespace prefixd::bench {

struct StageMs {
  double read = 0, select = 0, compute = 0;
};

struct AttachReport {
  bool found = false;  // the prefix was there before; then these two are what was left to do
  // After the commit, in the background: until summaries are ready, and until rows are settled.
  double ingest_seconds = 0, settled_seconds = 0;
  double cold_attach_ms = 0, cold_step_ms = 0;
  double cold_step_bytes = 0;    // that the cold step read from the disk
  double cold_next_step_ms = 0;  // the second one of the same session
  Spread warm_attach_ms, warm_step_ms;
  Spread next_step_ms;  // the second one of the same sessions
  // In milliseconds of its threads, what a step spent reading, selecting and computing: the cold
  // one, and of the last warm session the first and the second.
  StageMs cold_stages, first_stages, next_stages;
};

// A completed step: all layers, K and the moment estimator by a budget of 2%. Cold means an empty
// host tier; small files beside the segment may be in the kernel's page cache either way. Between
// two warm attaches no session is left.
//
// `dir` holds the store. With `keep` it is left there, and a later call with the same prompt and
// directory finds the prefix stored and ready (what was interrupted goes on): building summaries
// and indexes takes minutes. Without, the directory is removed.
Result<AttachReport> MeasureAttach(const Prompt& prompt, const std::filesystem::path& dir,
                                   bool keep, uint32_t repeats);

}  // namespace prefixd::bench
