// Writes feature maps with random weights: training does not change what they cost.
#pragma once

#include <cstdint>
#include <filesystem>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"

namespace prefixd::bench {

// Of 128 features (the paper's), for prompts of `length` tokens.
Status WriteRandomMaps(const std::filesystem::path& path, const KvGeometry& geometry,
                       uint32_t length);

}  // namespace prefixd::bench
