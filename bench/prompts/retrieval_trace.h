// Holds what a real model retrieves: the exact Top-K sets of every (layer, KV head) over the steps
// of a decode, with the keys they were chosen from and the queries that a put would have sampled.
// It comes from a file (trace_file.h), or from prefixd's own decoder on the small model.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/partition.h"
#include "prefixd/result.h"

namespace prefixd::bench {

struct TraceOptions {
  std::filesystem::path file;  // of python -m prefixd.trace; empty: the decoder reads the document
  std::filesystem::path model_dir = "models/prefixd-tiny";
  std::filesystem::path document = "/usr/share/common-licenses/GPL-3";
  uint32_t prompt_tokens = 8192;  // upper bound; the document with planted facts
  uint32_t steps = 64;  // captured: one half continues the text, the other asks about facts
  std::vector<double> fractions = {0.01, 0.04};  // K as a share of the mid region
  uint32_t query_samples = 32;                   // sampled in the last quarter
};

struct RetrievalTrace {
  KvGeometry geometry;
  std::vector<uint32_t> tokens;  // [n_tokens]
  uint32_t n_tokens = 0;
  TokenRange mid;                    // retrieved tokens lie here: all but sinks and tail
  std::vector<uint32_t> sampled_at;  // positions of the sampled queries, ascending

  struct Head {
    std::vector<float> keys;            // [n_tokens][key_dim], as stored (rounded to the dtype)
    std::vector<float> values;          // [n_tokens][value_dim]
    std::vector<float> sample_queries;  // [samples * group][key_dim]
    std::vector<float> step_queries;    // [steps][group][key_dim], in the order of decoding
    // [fraction][step]: the retrieved tokens, ascending
    std::vector<std::vector<std::vector<uint32_t>>> sets;
  };
  std::vector<Head> heads;  // [n_layers * n_kv_heads]
};

// Reads the file, or prefills the model's own decoder with the document (seconds to a minute) and
// decodes with exact attention, so that the retrieved sets do not depend on any approximation; then
// finds the sets, on all cores.
Result<RetrievalTrace> MakeTrace(const TraceOptions& options);

}  // namespace prefixd::bench
