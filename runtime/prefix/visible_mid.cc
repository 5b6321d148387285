#include "runtime/prefix/visible_mid.h"

#include <algorithm>
#include <cmath>

namespace prefixd {

TokenRange VisibleMid(const StepPolicy::Window& window, uint32_t layer, uint32_t n_layers,
                      const Partition& partition) {
  TokenRange mid = partition.mid;
  const uint32_t first_layer = static_cast<uint32_t>(uint64_t{3} * n_layers / 4);
  if (layer < first_layer) return mid;
  const double depth = double(layer - first_layer) / double(n_layers - first_layer);
  const double hidden = 1 - std::pow(window.phi, window.alpha * depth);
  const auto first = static_cast<uint32_t>(std::floor(hidden * partition.tail.end));
  mid.begin = std::clamp(first, mid.begin, mid.end);
  return mid;
}

}  // namespace prefixd
