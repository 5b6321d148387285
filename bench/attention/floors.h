// Measures the floors of this machine's memory beside the figures that are compared with them.
#pragma once

#include "bench/attention/layers.h"

namespace prefixd::bench {

// Returns the bytes per second at which all threads read `bytes` bytes from `begin` on in sequence.
double ReadBandwidth(Team& team, const RowMemory& memory, size_t begin, size_t bytes);

// Returns the seconds in which all threads read the given rows and do nothing else with them:
// [head][k] rows of one layer, one head after another per thread, prefetched into the cache.
double GatherSeconds(Team& team, const Layers& layers, size_t layer,
                     const std::vector<uint32_t>& ids);

// Holds places `at` of an array that a search or a step reads.
struct Pieces {
  const std::byte* array = nullptr;
  size_t stride = 0, bytes = 0;  // bytes: per piece, whole lines
  std::vector<uint32_t> at;      // never descending
};
// Returns the seconds in which all threads read all lists of each head, one after the other and
// prefetched into the cache, and do nothing else. heads: [head][list].
double PiecesSeconds(Team& team, const std::vector<std::vector<Pieces>>& heads);

}  // namespace prefixd::bench
