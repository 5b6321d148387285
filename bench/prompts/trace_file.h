// Reads a trace that `python -m prefixd.trace` recorded of a real model: keys and values of a
// prompt, samples of its own queries, and the queries of the steps behind it.
//
// A safetensors file with the metadata format = "prefixd-trace-v1", model, kind, source, layers
// (JSON: scale and softcap of each) and turns (JSON: steps of each run that begins behind the
// prompt anew). Tensors, for each layer l:
//   tokens [n], step_tokens [steps], sampled_at [samples]                       I32
//   layers.{l}.k [Hkv, n, dk]   layers.{l}.v [Hkv, n, dv]                       BF16
//   layers.{l}.samples [samples, Hq, dk]   layers.{l}.steps [steps, Hq, dk]     F32
#pragma once

#include <filesystem>

#include "bench/prompts/retrieval_trace.h"
#include "prefixd/result.h"

namespace prefixd::bench {

inline constexpr char kTraceFormat[] = "prefixd-trace-v1";

// Returns the trace with at most `steps` of its steps, in runs of kTraceRun that are spread over
// all of them, and without sets. Errors: as from SafetensorsFile::Open; kInvalidArgument when the
// file is no trace, or a tensor is missing or misshapen.
Result<RetrievalTrace> ReadTraceFile(const std::filesystem::path& path, uint32_t steps);

// Consecutive steps that stay together: what shares sets between steps needs neighbours.
inline constexpr uint32_t kTraceRun = 16;

}  // namespace prefixd::bench
