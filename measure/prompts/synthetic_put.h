// Writes a prompt's made-up keys and values into a put, without holding them all.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "measure/prompts/synthetic_kv.h"
#include "prefixd/kv_shape.h"
#include "prefixd/result.h"
#include "prefixd/store.h"

namespace prefixd::bench {

// Writes `tokens` of every layer, `synthetic[layer]` each; `written` hears of each layer. Returns
// the seconds that the put's calls took.
Result<double> WriteSynthetic(PutStream& put, const KvGeometry& geometry, uint32_t tokens,
                              std::vector<SyntheticKv>& synthetic,
                              const std::function<void(uint32_t layer)>& written);

}  // namespace prefixd::bench
