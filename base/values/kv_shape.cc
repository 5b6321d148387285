#include "prefixd/kv_shape.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <string>
#include <tuple>

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

Status CheckHeads(uint32_t n_q_heads, uint32_t n_kv_heads) {
  PREFIXD_TRY(CheckRange("n_q_heads", n_q_heads, kMaxHeads));
  PREFIXD_TRY(CheckRange("n_kv_heads", n_kv_heads, kMaxHeads));
  if (n_q_heads % n_kv_heads != 0) {
    return InvalidArgument("n_kv_heads (" + std::to_string(n_kv_heads) +
                           ") must divide n_q_heads (" + std::to_string(n_q_heads) + ")");
  }
  return CheckRange("group size n_q_heads / n_kv_heads", n_q_heads / n_kv_heads, kMaxGroup);
}

Status CheckDims(uint32_t key_dim, uint32_t value_dim) {
  PREFIXD_TRY(CheckRange("key_dim", key_dim, kMaxDim));
  return CheckRange("value_dim", value_dim, kMaxDim);
}

Status CheckLayer(const LayerGeometry& layer, const LayerShape& shape) {
  if (!layer.stored) return {};
  if (!std::isfinite(layer.scale) || layer.scale <= 0) {
    return InvalidArgument("scale must be positive and finite, usually 1/sqrt(key_dim)");
  }
  if (!std::isfinite(layer.softcap) || layer.softcap < 0) {
    return InvalidArgument("softcap must be 0 (none) or positive and finite");
  }
  PREFIXD_TRY(CheckHeads(shape.n_q_heads, shape.n_kv_heads));
  return CheckDims(shape.key_dim, shape.value_dim);
}

// What one row run is made of, which is what the kinds of layers differ in.
std::array<uint32_t, 3> KindOf(const LayerShape& shape) {
  return {shape.n_kv_heads, shape.key_dim, shape.value_dim};
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

bool KvGeometry::alike() const {
  const LayerShape own{n_q_heads, n_kv_heads, key_dim, value_dim, dtype};
  for (uint32_t l = 0; l < layers.size(); ++l) {
    if (layer(l) != own) return false;
  }
  return true;
}

bool KvGeometry::operator==(const KvGeometry& other) const {
  const auto numbers = [](const KvGeometry& g) {
    return std::tie(g.n_layers, g.n_q_heads, g.n_kv_heads, g.key_dim, g.value_dim, g.dtype);
  };
  const auto parameters = [](const LayerGeometry& l) {
    return std::tie(l.scale, l.softcap, l.sliding_window, l.stored);
  };
  if (numbers(*this) != numbers(other) || layers.size() != other.layers.size()) return false;
  for (uint32_t l = 0; l < layers.size(); ++l) {
    if (parameters(layers[l]) != parameters(other.layers[l])) return false;
    if (layer(l) != other.layer(l)) return false;
  }
  return true;
}

HeadIndex KvGeometry::heads() const {
  if (alike()) return {n_layers, n_kv_heads};
  std::vector<uint32_t> of_layer;
  of_layer.reserve(layers.size());
  for (uint32_t l = 0; l < layers.size(); ++l) of_layer.push_back(layer(l).n_kv_heads);
  return HeadIndex(of_layer);
}

size_t KvGeometry::token_bytes() const {
  size_t bytes = 0;
  for (uint32_t l = 0; l < layers.size(); ++l) bytes += layer(l).n_kv_heads * row(l).bytes();
  return bytes;
}

Status KvGeometry::Validate() const {
  PREFIXD_TRY(CheckRange("n_layers", n_layers, kMaxLayers));
  PREFIXD_TRY(CheckHeads(n_q_heads, n_kv_heads));
  PREFIXD_TRY(CheckDims(key_dim, value_dim));
  if (DTypeName(dtype) == "unknown") {
    return InvalidArgument("dtype is none of f32, f16, bf16");
  }
  if (layers.size() != n_layers) {
    return InvalidArgument("layers has " + std::to_string(layers.size()) +
                           " entries; n_layers is " + std::to_string(n_layers));
  }
  std::set<std::array<uint32_t, 3>> kinds;
  for (uint32_t i = 0; i < n_layers; ++i) {
    const LayerShape shape = layer(i);
    if (Status status = CheckLayer(layers[i], shape); !status.ok()) {
      return InvalidArgument("layer " + std::to_string(i) + ": " + status.error().message);
    }
    kinds.insert(KindOf(shape));
  }
  if (std::ranges::none_of(layers, &LayerGeometry::stored)) {
    return InvalidArgument("no layer is stored; at least one must be");
  }
  kinds.erase({n_kv_heads, key_dim, value_dim});
  if (kinds.size() > kMaxLayerKinds) {
    return InvalidArgument("the layers have " + std::to_string(kinds.size()) +
                           " kinds of heads and dimensions beside the model's; at most " +
                           std::to_string(kMaxLayerKinds) + " are possible");
  }
  return {};
}

}  // namespace prefixd
