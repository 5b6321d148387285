#include "storage/store/row_request.h"

#include <algorithm>
#include <string>

namespace prefixd::storage {

Status CheckRun(const KvGeometry& g, uint32_t layer, uint32_t kv_head) {
  const uint32_t heads = layer < g.n_layers ? g.layer(layer).n_kv_heads : g.n_kv_heads;
  if (layer < g.n_layers && kv_head < heads) return {};
  return InvalidArgument("layer " + std::to_string(layer) + ", KV head " + std::to_string(kv_head) +
                         " of a model with " + std::to_string(g.n_layers) + " layers and " +
                         std::to_string(heads) + " KV heads");
}

Status CheckIds(std::span<const uint32_t> ids, uint32_t n_tokens) {
  if (std::is_sorted(ids.begin(), ids.end()) && (ids.empty() || ids.back() < n_tokens)) {
    return {};
  }
  return InvalidArgument("row ids must ascend and stay below " + std::to_string(n_tokens));
}

Status CheckSink(const RowShape& row, size_t rows, RowPart part, const RowSink& out) {
  const auto check = [&](std::span<std::byte> bytes, size_t stride, size_t item) -> Status {
    const size_t needed = rows == 0 ? 0 : (rows - 1) * stride + item;
    if (stride >= item && bytes.size() >= needed) return {};
    return InvalidArgument("a buffer of " + std::to_string(bytes.size()) + " bytes with rows " +
                           std::to_string(stride) + " bytes apart cannot take " +
                           std::to_string(rows) + " of " + std::to_string(item) + " bytes");
  };
  if (part != RowPart::kRow || out.values.empty()) {
    return check(out.bytes, out.stride, PartBytes(row, part));
  }
  PREFIXD_TRY(check(out.bytes, out.stride, row.key_bytes()));
  return check(out.values, out.value_stride, row.value_bytes());
}

RowTarget TargetOf(const RowShape& row, const RowSink& out, RowPart part) {
  std::byte* const first = out.bytes.data();
  if (part == RowPart::kKey) return {first, out.stride, nullptr, 0};
  if (part == RowPart::kValue) return {nullptr, 0, first, out.stride};
  if (!out.values.empty()) return {first, out.stride, out.values.data(), out.value_stride};
  return {first, out.stride, first + row.key_bytes(), out.stride};
}

}  // namespace prefixd::storage
