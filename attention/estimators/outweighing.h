// Finds keys whose features outweigh those of all others (docs/mathematics.md, "Guards").
//
// A sum of features that one key owns keeps nothing of the others: once that key is retrieved and
// subtracted, rounding is left. So such keys do not enter the sums of a phi cache; it keeps them
// apart and counts them exactly.
//
// Thread-safety: pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace prefixd {

// A key outweighs others if one of its features is more than 1000 times the sum of theirs: what is
// left of them in float32 is then known to some 1e-3 at best. In nats.
inline constexpr double kOutweighs = 6.907755278982137;
// A phi cache keeps at most so many rows apart.
inline constexpr size_t kMostApart = 4;

// One feature of the rows that may outweigh: weights, and the sum of all other rows, as logarithms
// (-inf: none).
//   excess: [weights.size()], in: the largest so far; raised to how far the row, or a smaller one
//   of those that outweigh with it, lies above the sum of all that are smaller.
void RaiseExcess(std::span<const float> log_weights, double log_rest, std::span<double> excess);

// Returns the rows that outweigh all others of the same set, ascending: those that do so in any
// feature, alone or with at most kMostApart - 1 others. A row that outweighs a larger set outweighs
// this one, too. None of a single row.
//   log_phi: [n][d_phi]
std::vector<uint32_t> OutweighingRows(std::span<const float> log_phi, size_t n, uint32_t d_phi);

}  // namespace prefixd
