#include "base/session_arguments.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "prefixd/attach.h"

namespace prefixd {

Status CheckOwnMemory(uint32_t own_memory_tokens) {
  if (own_memory_tokens == 0 || own_memory_tokens >= kMinOwnMemoryTokens) return {};
  return InvalidArgument("own_memory_tokens is 0 (all own tokens stay in memory) or at least " +
                         std::to_string(kMinOwnMemoryTokens) + ", not " +
                         std::to_string(own_memory_tokens));
}

Error SessionDetached(uint64_t id) {
  return {Code::kFailedPrecondition,
          "session " + std::to_string(id) + " was detached; attach again"};
}

Status CheckSize(const char* what, size_t got, size_t want) {
  if (got == want) return {};
  return InvalidArgument(std::string(what) + " has " + std::to_string(got) +
                         " elements; this geometry takes " + std::to_string(want));
}

namespace {

Status CheckLayer(const KvGeometry& geometry, uint32_t layer) {
  if (layer >= geometry.n_layers) {
    return InvalidArgument("layer " + std::to_string(layer) + " is not one of the model's " +
                           std::to_string(geometry.n_layers));
  }
  if (!geometry.layers[layer].stored) {
    return InvalidArgument("layer " + std::to_string(layer) +
                           " has no rows: the model was registered without them");
  }
  return {};
}

Result<HeadRange> Resolve(HeadRange heads, uint32_t all, const std::string& whose) {
  if (heads.first < all && heads.n <= all - heads.first) {
    return HeadRange{heads.first, heads.n > 0 ? heads.n : all - heads.first};
  }
  return InvalidArgument("KV heads " + std::to_string(heads.first) + ".." +
                         (heads.n > 0 ? std::to_string(uint64_t{heads.first} + heads.n) : "") +
                         " are not all among the " + std::to_string(all) + " of " + whose);
}

}  // namespace

Status CheckHead(const KvGeometry& geometry, uint32_t layer, uint32_t kv_head) {
  if (layer < geometry.n_layers && kv_head < geometry.layer(layer).n_kv_heads) return {};
  PREFIXD_TRY(CheckLayer(geometry, layer));
  return InvalidArgument("KV head " + std::to_string(kv_head) + " is not one of the " +
                         std::to_string(geometry.layer(layer).n_kv_heads) + " of layer " +
                         std::to_string(layer));
}

Status CheckIds(std::span<const uint32_t> ids, uint32_t n_tokens) {
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] >= n_tokens || (i > 0 && ids[i] <= ids[i - 1])) {
      return InvalidArgument("ids must ascend and lie below " + std::to_string(n_tokens) + "; id " +
                             std::to_string(i) + " is " + std::to_string(ids[i]));
    }
  }
  return {};
}

Status CheckRange(TokenRange range, uint32_t n_tokens) {
  if (range.begin <= range.end && range.end <= n_tokens) return {};
  return InvalidArgument("tokens " + std::to_string(range.begin) + ".." +
                         std::to_string(range.end) + " are not a run of the prefix's " +
                         std::to_string(n_tokens));
}

Result<HeadRange> ResolveHeads(const KvGeometry& geometry, uint32_t layer, HeadRange heads) {
  return Resolve(heads, geometry.layer(layer).n_kv_heads, "layer " + std::to_string(layer));
}

Result<HeadRange> CheckSlice(const SessionInfo& info, const LayerSlice& slice, size_t k_bytes,
                             size_t v_bytes) {
  const KvGeometry& g = info.geometry;
  PREFIXD_TRY(CheckHead(g, slice.layer, slice.heads.first));
  PREFIXD_ASSIGN(const HeadRange heads, ResolveHeads(g, slice.layer, slice.heads));
  PREFIXD_TRY(CheckRange(slice.tokens, info.n_tokens));
  const size_t rows = size_t{slice.tokens.size()} * heads.n;
  const RowShape row = g.row(slice.layer);
  PREFIXD_TRY(CheckSize("k", k_bytes, rows * row.key_bytes()));
  PREFIXD_TRY(CheckSize("v", v_bytes, rows * row.value_bytes()));
  return heads;
}

size_t SeriesEnd(std::span<const LayerRead> reads, size_t begin) {
  size_t end = begin;
  for (uint64_t bytes = 0; end < reads.size() && (end == begin || bytes < kSeriesBytes); ++end) {
    bytes += reads[end].k.size() + reads[end].v.size();
  }
  return end;
}

namespace {

// Resolves heads of a layer that prefixd attends over.
Result<HeadRange> AttendedHeads(const KvGeometry& geometry, uint32_t layer, HeadRange heads) {
  PREFIXD_TRY(CheckLayer(geometry, layer));
  if (geometry.layers[layer].sliding_window > 0) {
    return Error{Code::kFailedPrecondition,
                 "layer " + std::to_string(layer) + " has a sliding window of " +
                     std::to_string(geometry.layers[layer].sliding_window) +
                     " tokens: its attention is the engine's own"};
  }
  return ResolveHeads(geometry, layer, heads);
}

}  // namespace

Result<HeadRange> CheckQueries(const KvGeometry& geometry, uint32_t layer, HeadRange heads,
                               uint32_t n, std::span<const float> q, std::span<const float> y,
                               std::span<const float> lse) {
  PREFIXD_ASSIGN(heads, AttendedHeads(geometry, layer, heads));
  const LayerShape shape = geometry.layer(layer);
  const size_t per_query = size_t{heads.n} * shape.group_size();
  PREFIXD_TRY(CheckSize("q", q.size(), n * per_query * shape.key_dim));
  PREFIXD_TRY(CheckSize("y", y.size(), n * per_query * shape.value_dim));
  PREFIXD_TRY(CheckSize("lse", lse.size(), n * per_query));
  for (size_t i = 0; i < q.size(); ++i) {
    if (!std::isfinite(q[i])) {
      const size_t row = i / shape.key_dim;
      return InvalidArgument(
          "q of layer " + std::to_string(layer) + ", query " + std::to_string(row / per_query) +
          ", head " + std::to_string(size_t{heads.first} * shape.group_size() + row % per_query) +
          " is NaN or Inf");
    }
  }
  return heads;
}

Result<HeadRange> CheckOwnRows(const KvGeometry& geometry, uint32_t layer, HeadRange heads,
                               uint32_t n, size_t k_bytes, size_t v_bytes) {
  PREFIXD_TRY(CheckLayer(geometry, layer));
  PREFIXD_ASSIGN(heads, ResolveHeads(geometry, layer, heads));
  const RowShape row = geometry.row(layer);
  PREFIXD_TRY(CheckPutSize("k", k_bytes, size_t{n} * heads.n * row.key_bytes()));
  PREFIXD_TRY(CheckPutSize("v", v_bytes, size_t{n} * heads.n * row.value_bytes()));
  return heads;
}

Status CheckOwnBlock(uint32_t layer, uint32_t kv_head, uint32_t own, uint32_t n,
                     uint32_t own_after) {
  if (own == 0) return {};  // the block attends to the prefix alone
  if (uint64_t{n} + own_after <= own) return {};
  return InvalidArgument(
      "KV head " + std::to_string(kv_head) + " of layer " + std::to_string(layer) + " has " +
      std::to_string(own) + " own tokens, and the queries are of " + std::to_string(n) + " with " +
      std::to_string(own_after) + " behind them: append the rows of a block before it attends");
}

Error PutEnded() {
  return {Code::kFailedPrecondition, "this put was committed or aborted already; begin another"};
}

Result<HeadRange> ResolvePutHeads(const KvGeometry& geometry, HeadRange heads) {
  PREFIXD_ASSIGN(heads, Resolve(heads, geometry.n_kv_heads, "the model"));
  if (heads.n == geometry.n_kv_heads) return heads;
  for (uint32_t l = 0; l < geometry.n_layers; ++l) {
    const uint64_t own = geometry.layer(l).n_kv_heads;
    if (heads.first * own % geometry.n_kv_heads == 0 && heads.n * own % geometry.n_kv_heads == 0) {
      continue;
    }
    return InvalidArgument("KV heads " + std::to_string(heads.first) + ".." +
                           std::to_string(heads.first + heads.n) + " of " +
                           std::to_string(geometry.n_kv_heads) + " are no whole heads of the " +
                           std::to_string(own) + " of layer " + std::to_string(l));
  }
  return heads;
}

HeadRange HeadsIn(const KvGeometry& geometry, uint32_t layer, HeadRange heads) {
  const uint32_t own = geometry.layer(layer).n_kv_heads;
  return {heads.first * own / geometry.n_kv_heads, heads.n * own / geometry.n_kv_heads};
}

KvGeometry GeometryOf(const KvGeometry& geometry, HeadRange heads) {
  KvGeometry own = geometry;
  own.n_q_heads = heads.n * (geometry.n_q_heads / geometry.n_kv_heads);
  own.n_kv_heads = heads.n;
  for (uint32_t l = 0; l < geometry.n_layers; ++l) {
    LayerGeometry& layer = own.layers[l];
    if (!layer.stored || (layer.n_q_heads == 0 && layer.n_kv_heads == 0)) continue;
    layer.n_kv_heads = HeadsIn(geometry, l, heads).n;
    layer.n_q_heads = layer.n_kv_heads * geometry.group_size(l);
  }
  return own;
}

uint32_t StoredLayers(const KvGeometry& geometry) {
  return static_cast<uint32_t>(std::ranges::count(geometry.layers, true, &LayerGeometry::stored));
}

Status CheckPutRun(const KvGeometry& geometry, uint32_t prompt_tokens, uint32_t layer,
                   uint32_t first, uint32_t n) {
  PREFIXD_TRY(CheckLayer(geometry, layer));
  if (first > prompt_tokens || n > prompt_tokens - first) {
    return InvalidArgument("tokens " + std::to_string(first) + ".." +
                           std::to_string(uint64_t{first} + n) + " are not all in the prompt of " +
                           std::to_string(prompt_tokens));
  }
  return {};
}

Status CheckPutSize(const char* what, size_t got, size_t want) {
  if (got == want) return {};
  return InvalidArgument(std::string(what) + " has " + std::to_string(got) +
                         " bytes; this many tokens of the model's geometry take " +
                         std::to_string(want));
}

Error NotOfThisStore() {
  return InvalidArgument("a batch takes sessions that are attached to its own store");
}

Error NoSuchPrefix(std::string_view id) {
  return {Code::kNotFound,
          "no prefix named '" + std::string(id) + "'; see `prefixctl prefixes list`"};
}

}  // namespace prefixd
