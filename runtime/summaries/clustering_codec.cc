#include "runtime/summaries/clustering_codec.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "runtime/derived/blob_pack.h"

namespace prefixd {

std::vector<std::byte> SerializeClusterings(std::span<const Clustering> clusterings) {
  std::vector<std::vector<std::byte>> entries(clusterings.size());
  for (size_t head = 0; head < entries.size(); ++head) {
    for (uint32_t c = 0; c < clusterings[head].size(); ++c) {
      const auto bytes = std::as_bytes(clusterings[head].centre(c));
      entries[head].insert(entries[head].end(), bytes.begin(), bytes.end());
    }
  }
  return PackBlob(entries);
}

Result<std::vector<Clustering>> DeserializeClusterings(std::span<const std::byte> blob,
                                                       std::span<const uint32_t> key_dims) {
  PREFIXD_ASSIGN(const auto entries, UnpackBlob(blob, key_dims.size()));
  std::vector<Clustering> clusterings(entries.size());
  for (size_t head = 0; head < entries.size(); ++head) {
    std::vector<float> centres(entries[head].size() / sizeof(float));
    if (!centres.empty()) {
      std::memcpy(centres.data(), entries[head].data(), centres.size() * sizeof(float));
    }
    const uint32_t key_dim = key_dims[head];
    const bool kept = key_dim > 0;
    const bool whole =
        centres.size() * sizeof(float) == entries[head].size() &&
        (!kept || (centres.size() % key_dim == 0 && centres.size() / key_dim <= 65536)) &&
        centres.empty() != kept;
    if (!whole || !std::ranges::all_of(centres, [](float x) { return std::isfinite(x); })) {
      return Error{Code::kCorrupt, "the stored clustering is malformed"};
    }
    if (kept) clusterings[head] = Clustering(key_dim, std::move(centres));
  }
  return clusterings;
}

}  // namespace prefixd
