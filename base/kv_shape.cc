#include "prefixd/kv_shape.h"

#include <cmath>
#include <string>

namespace prefixd {
namespace {

constexpr uint32_t kMaxLayers = 1024;
constexpr uint32_t kMaxHeads = 1024;
constexpr uint32_t kMaxDim = 1024;
constexpr uint32_t kMaxGroup = 64;

Status CheckRange(const char* name, uint32_t value, uint32_t max) {
  if (value >= 1 && value <= max) return {};
  return InvalidArgument(std::string(name) + " is " + std::to_string(value) + "; must be 1.." +
                         std::to_string(max));
}

Status CheckLayer(uint32_t index, const LayerGeometry& layer) {
  const std::string where = "layer " + std::to_string(index) + ": ";
  if (!std::isfinite(layer.scale) || layer.scale <= 0) {
    return InvalidArgument(where + "scale must be positive and finite, usually 1/sqrt(key_dim)");
  }
  if (!std::isfinite(layer.softcap) || layer.softcap < 0) {
    return InvalidArgument(where + "softcap must be 0 (none) or positive and finite");
  }
  return {};
}

}  // namespace

std::string_view DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kF16:
      return "f16";
    case DType::kBf16:
      return "bf16";
  }
  return "unknown";
}

Result<DType> DTypeFromName(std::string_view name) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    if (DTypeName(dtype) == name) return dtype;
  }
  return InvalidArgument("unknown dtype '" + std::string(name) + "'; known: f32, f16, bf16");
}

Status KvGeometry::Validate() const {
  PREFIXD_TRY(CheckRange("n_layers", n_layers, kMaxLayers));
  PREFIXD_TRY(CheckRange("n_q_heads", n_q_heads, kMaxHeads));
  PREFIXD_TRY(CheckRange("n_kv_heads", n_kv_heads, kMaxHeads));
  PREFIXD_TRY(CheckRange("key_dim", key_dim, kMaxDim));
  PREFIXD_TRY(CheckRange("value_dim", value_dim, kMaxDim));
  if (n_q_heads % n_kv_heads != 0) {
    return InvalidArgument("n_kv_heads (" + std::to_string(n_kv_heads) +
                           ") must divide n_q_heads (" + std::to_string(n_q_heads) + ")");
  }
  PREFIXD_TRY(CheckRange("group size n_q_heads / n_kv_heads", group_size(), kMaxGroup));
  if (DTypeName(dtype) == "unknown") {
    return InvalidArgument("dtype is none of f32, f16, bf16");
  }
  if (layers.size() != n_layers) {
    return InvalidArgument("layers has " + std::to_string(layers.size()) +
                           " entries; n_layers is " + std::to_string(n_layers));
  }
  for (uint32_t i = 0; i < n_layers; ++i) PREFIXD_TRY(CheckLayer(i, layers[i]));
  return {};
}

}  // namespace prefixd
