// Turns the ledger of steps that search by codes into the pieces of memory that they read, for
// their floor.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "bench/attention/floors.h"
#include "bench/attention/layers.h"
#include "prefixd/ledger.h"

namespace prefixd::bench {

// Returns for each head what a search and the step after it read, at random places: as many places
// of each kind as the mean search of `spent` did. The kinds are blocks of codes and their means,
// keys of the short list, and values of the k retrieved rows. `layers` has at least 3 layers; their
// memory stands for all of these.
std::vector<std::vector<Pieces>> ReadBySearch(const Ledger& spent, uint32_t k, const Layers& layers,
                                              size_t layer, std::mt19937_64& rng);

// Returns for each head what a step with a shared set reads, side by side: as many rows as the mean
// step of `spent` that did not search. Steps that searched read k. Some steps must have shared.
std::vector<std::vector<Pieces>> ReadBySharing(const Ledger& spent, uint32_t k,
                                               const Layers& layers, size_t layer);

}  // namespace prefixd::bench
