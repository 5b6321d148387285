// Measures what storing keys as int8 changes on a real model's keys and queries, and how fast rows
// are encoded and decoded.
#pragma once

#include <cstdint>

#include "bench/prompts/retrieval_trace.h"

namespace prefixd::bench {

struct Int8Error {
  double bytes_per_key = 0;
  // Distance to the given key over its norm: root of the mean square, and largest.
  double key_rms = 0, key_max = 0;
  // Error of the scores of the prefill's sampled queries, in natural-log units: root of the mean
  // square.
  double score_rms = 0;
  // Share of the 1% of tokens with the largest scores that are still among them.
  double recall = 0;
};

// Measures one scale per key, as in the store, read back in the model's dtype.
Int8Error MeasureInt8Error(const RetrievalTrace& trace);

struct EncodingSpeed {
  double encode = 0, decode = 0;  // bytes of rows as given, per second; one thread, medians
};
// Encodes rows of `dim` + `dim` bf16 elements, over more memory than the caches hold.
EncodingSpeed MeasureEncodingSpeed(uint32_t dim, uint32_t rounds);

}  // namespace prefixd::bench
