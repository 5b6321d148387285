// Keys less their mean: a constant per query, that graphs and lists are better without. Internal.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "attention/rows/rows.h"
#include "prefixd/result.h"

namespace prefixd::index {

// As float32, [n][dim]; mean: [dim], out. kInvalidArgument names the token (first_token + row) of a
// key that is not finite, or too large for 16 bits.
Result<std::vector<float>> CentredKeys(const RowsView& keys, uint32_t first_token,
                                       std::span<float> mean);

}  // namespace prefixd::index
