// Encodes clusterings as one blob (runtime/derived/blob_pack.h) with an entry for each (layer, KV
// head): its centres, float32 [n][key_dim]; the entry is empty where the layer keeps no summaries.
//
// Thread-safety: free functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/estimators/clusters.h"
#include "prefixd/result.h"

namespace prefixd {

std::vector<std::byte> SerializeClusterings(std::span<const Clustering> clusterings);
// key_dims: [heads]; 0: the head has no clustering. kCorrupt when the blob is malformed, its
// geometry differs, or a centre is not finite.
Result<std::vector<Clustering>> DeserializeClusterings(std::span<const std::byte> blob,
                                                       std::span<const uint32_t> key_dims);

}  // namespace prefixd
