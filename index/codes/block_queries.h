// A group's queries as scans of block codes (block_codes.h) take them: the integer score of a
// block's mean becomes the bias of its keys' integer scores.
//
// Thread-safety: plain values and pure functions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "index/codes/block_codes.h"
#include "index/codes/code_weights.h"
#include "index/codes/key_codes.h"
#include "prefixd/result.h"

namespace prefixd {

// A mean's score is means.mul v + means.add; a key's is keys.mul v + keys.add, where v has the
// block's own bias, keys.bias + BlockBias(mean's v). Every v is within int16. But for the rounding
// of float32, a key's score is that of its approximation within
//   keys.mul (1.5 fields + 0.5) + 1.5 fields means.mul:
// digits are at most 3, and weights and biases off by half.
struct BlockQueries {
  CodeQueries means, keys;
  std::vector<float> error;          // [heads], deviation of a key's score from the exact one's
  std::vector<float> units_of_mean;  // [heads], means.mul / keys.mul
  int32_t BlockBias(size_t head, int16_t mean) const {
    return InUnitsOfKeys(units_of_mean[head], mean);
  }
};
// queries: [heads][key_dim], finite. kInvalidArgument: scores overflow.
Result<BlockQueries> PrepareBlockQueries(const BlockCodeBook& book, std::span<const float> queries,
                                         uint32_t heads, float scale);

}  // namespace prefixd
