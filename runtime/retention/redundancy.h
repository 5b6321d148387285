// Says which tokens' keys double others (G-KV, the term that it takes from R-KV), for one KV head.
//
// Thread-safety: pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/rows/rows.h"
#include "prefixd/partition.h"

namespace prefixd {

inline constexpr double kAlike = 0.5;             // cosines below it do not count
inline constexpr double kGlobalWeight = 0.9;      // of the global score beside the redundancy
inline constexpr uint32_t kRedundantNewest = 16;  // tokens that are nobody's older double
// A key is compared with at most so many others, one drawn from each of as many stretches of equal
// length, so that time grows with the length and not with its square. The standard error of a mean
// is below 0.008.
inline constexpr uint32_t kCompared = 4096;

// Returns R' of the tokens of `region`: the softmax over them of the mean cosine of a token's key
// with those of all `rows`, over its largest, so that the most redundant token has 1. The mean
// stands for the paper's sum, so that the softmax does not sharpen with the length.
std::vector<double> Redundancy(const RowsView& rows, TokenRange region);

// Returns the memory that Redundancy takes, in bytes.
uint64_t RedundancyBytes(TokenRange region, const RowShape& shape);

// Makes G-KV's score of a global one, in place. The paper adds the redundancy and so keeps doubles;
// R-KV takes it off, which is what is done here. A token that no query saw keeps its score.
void TakeOffRedundancy(std::span<const double> redundancy, std::span<double> scores);

}  // namespace prefixd
