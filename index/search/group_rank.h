// The rank by which a group of query heads shares one retrieved set (docs/mathematics.md): best of
// the normalised scores. Internal to index/; SelectByGroupMax of attention/ decides.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace prefixd::index {

// logsumexp of each head's scores: [group]. scores: [group][n], finite.
std::vector<double> LogSumExp(std::span<const float> scores, uint32_t group);
// max over heads of s_i^g - L_g: [n].
std::vector<double> GroupRanks(std::span<const float> scores, uint32_t group,
                               std::span<const double> lse);

}  // namespace prefixd::index
