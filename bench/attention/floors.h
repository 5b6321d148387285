// What the memory of this machine allows, measured beside what is held to it.
#pragma once

#include "bench/attention/layers.h"

namespace prefixd::bench {

// Bytes per second at which all threads read memory in sequence: `bytes` from `begin` on.
double ReadBandwidth(Team& team, const RowMemory& memory, size_t begin, size_t bytes);

// Seconds in which all threads read the given rows, and do nothing else with them: [head][k] rows
// of one layer, one head after another per thread, asked for ahead of their use.
double GatherSeconds(Team& team, const Layers& layers, size_t layer,
                     const std::vector<uint32_t>& ids);

// Pieces of memory at places `at` of an array: what a search or a step reads of it.
struct Pieces {
  const std::byte* array = nullptr;
  size_t stride = 0, bytes = 0;  // of a piece: whole lines
  std::vector<uint32_t> at;      // not descending
};
// heads: [head][list]. Seconds in which all threads read, for each head, all its lists one after
// the other, asked for ahead of their use, and do nothing else.
double PiecesSeconds(Team& team, const std::vector<std::vector<Pieces>>& heads);

}  // namespace prefixd::bench
