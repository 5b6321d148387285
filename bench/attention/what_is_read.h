// What steps that search by codes read, by their ledger, as pieces of memory: for their floor.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "bench/attention/floors.h"
#include "bench/attention/layers.h"
#include "prefixd/ledger.h"

namespace prefixd::bench {

// Of each head what a search and the step after it read, as many places of each kind as the mean
// search of `spent` did, at random: blocks of codes and their means, keys of the short list, values
// of the k retrieved rows. Layers: at least 3, whose memory stands for all of these.
std::vector<std::vector<Pieces>> ReadBySearch(const Ledger& spent, uint32_t k, const Layers& layers,
                                              size_t layer, std::mt19937_64& rng);

// Of each head what a step reads that shares a set, side by side: as many rows as the mean of those
// of `spent` that did not search; those that did read k. Some must have shared.
std::vector<std::vector<Pieces>> ReadBySharing(const Ledger& spent, uint32_t k,
                                               const Layers& layers, size_t layer);

}  // namespace prefixd::bench
