// Measures how long a decoder waits for a stored prompt, from attach through the first completed
// step, with a store that was just opened (cold) and with one that has served the prompt before
// (warm).
#pragma once

#include <filesystem>

#include "measure/prompts/bench_prompt.h"
#include "measure/timing/statistics.h"

namespace prefixd::bench {

struct StageMs {
  double read = 0, select = 0, compute = 0;
};

struct AttachReport {
  bool found = false;  // the prefix was stored before; the next two then time the remaining work
  // Background work after the commit: until summaries are ready, and until rows are reclustered.
  double ingest_seconds = 0, reclustered_seconds = 0;
  double stored_bytes = 0;   // on the disk when all background work is done
  double written_bytes = 0;  // until then: what is on the disk, and what reclustering replaced
  double cold_attach_ms = 0, cold_step_ms = 0;
  double cold_step_bytes = 0;      // read from the disk by the cold step
  double cold_step_row_bytes = 0;  // of rows and summaries that it used
  double cold_next_step_ms = 0;    // second step of the same session
  Spread warm_attach_ms, warm_step_ms;
  Spread next_step_ms;  // second step of the same sessions
  // Thread time that a step spent reading, selecting and computing, in milliseconds: the cold step,
  // and the first and second step of the last warm session.
  StageMs cold_stages, first_stages, next_stages;
};

// Times a completed step: all layers, with K and the moment estimator by a budget of 2%. Cold means
// an empty host tier, and nothing of the store's files in the kernel's page cache.
// No session is left between two warm attaches.
//
// `dir` holds the store. With `keep` the store stays there, because building summaries and indexes
// takes minutes: a later call with the same prompt and directory finds the prefix stored and ready,
// and resumes interrupted work. Without it, the directory is removed.
Result<AttachReport> MeasureAttach(const Prompt& prompt, const std::filesystem::path& dir,
                                   bool keep, uint32_t repeats);

}  // namespace prefixd::bench
