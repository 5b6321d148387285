// Puts a synthetic prompt of one layer through any store, a block at a time: no more of it is held.
#pragma once

#include <cstdint>
#include <vector>

#include "prefixd/store.h"

namespace prefixd::bench {

// The ids of the prompt that PutSynthetic stores: first .. first + n - 1.
std::vector<uint32_t> SyntheticTokens(uint32_t n, uint32_t first = 0);

// Registers `model` (one layer, bf16), puts n tokens unless they are stored, and waits until they
// are ready to be attended to. Adds the time that making up the rows takes to `making_s`.
Status PutSynthetic(Store& store, const ModelSpec& model, uint32_t n, uint32_t first = 0,
                    double* making_s = nullptr);

}  // namespace prefixd::bench
