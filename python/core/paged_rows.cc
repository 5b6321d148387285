#include "python/core/paged_rows.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

namespace prefixd::python {
namespace {

// Calls f(block, token in the block, n tokens, tokens done so far) for each block of a run.
template <typename F>
void EachBlock(std::span<const int64_t> blocks, uint32_t block_tokens, uint32_t first, uint32_t n,
               F&& f) {
  for (uint32_t done = 0; done < n;) {
    const uint32_t token = first + done, at = token % block_tokens;
    const uint32_t run = std::min(block_tokens - at, n - done);
    f(static_cast<uint64_t>(blocks[token / block_tokens]), at, run, done);
    done += run;
  }
}

// Copies n tokens between rows (`row_step` elements apart) and the places that the table names.
template <typename T, bool kToCache>
void CopyTokens(T* places, const uint64_t* offsets, uint32_t dim, bool together, T* rows,
                size_t row_step, uint32_t n) {
  for (uint32_t t = 0; t < n; ++t, offsets += dim, rows += row_step) {
    if (together) {
      T* place = places + offsets[0];
      std::memcpy(kToCache ? place : rows, kToCache ? rows : place, dim * sizeof(T));
      continue;
    }
    for (uint32_t d = 0; d < dim; ++d) {
      if constexpr (kToCache) {
        places[offsets[d]] = rows[d];
      } else {
        rows[d] = places[offsets[d]];
      }
    }
  }
}

struct Rows {
  std::byte* data;
  const std::vector<uint64_t>& offsets;
  uint32_t dim;
  bool together;
};

template <typename T, bool kToCache>
void Copy(const PagedOrder& order, std::byte* cache, std::span<const int64_t> blocks,
          uint32_t first, uint32_t n, uint32_t row_heads, uint32_t first_head, const Rows& side) {
  const size_t row_step = size_t{row_heads} * side.dim;
  EachBlock(blocks, order.block_tokens, first, n,
            [&](uint64_t block, uint32_t at, uint32_t run, uint32_t done) {
              for (uint32_t h = 0; h < order.n_heads; ++h) {
                T* places = reinterpret_cast<T*>(cache) + block * order.block_stride +
                            h * order.head_stride;
                T* rows = reinterpret_cast<T*>(side.data) + done * row_step +
                          size_t{first_head + h} * side.dim;
                CopyTokens<T, kToCache>(places, side.offsets.data() + size_t{at} * side.dim,
                                        side.dim, side.together, rows, row_step, run);
              }
            });
}

template <bool kToCache, typename... Args>
void CopyElements(uint32_t element_bytes, const Args&... args) {
  if (element_bytes == 4) {
    Copy<uint32_t, kToCache>(args...);
  } else {
    Copy<uint16_t, kToCache>(args...);
  }
}

}  // namespace

Result<PagedRows::Side> PagedRows::SideOf(const std::vector<uint64_t>& offsets,
                                          uint32_t block_tokens, const char* name) {
  const std::string what = std::string(name) + "_offsets";
  if (offsets.empty() || offsets.size() % block_tokens != 0) {
    return InvalidArgument(what + " must be [block_tokens][dim]");
  }
  Side side;
  side.dim = uint32_t(offsets.size() / block_tokens);
  side.end = *std::max_element(offsets.begin(), offsets.end()) + 1;
  std::vector<uint64_t> sorted = offsets;
  std::sort(sorted.begin(), sorted.end());
  if (std::adjacent_find(sorted.begin(), sorted.end()) != sorted.end()) {
    return InvalidArgument(what + " names one place twice");
  }
  side.rows_together = true;
  for (size_t i = 0; i < offsets.size(); ++i) {
    side.rows_together &= offsets[i] == offsets[i - i % side.dim] + i % side.dim;
  }
  return side;
}

Result<PagedRows> PagedRows::Create(PagedOrder order, uint32_t element_bytes) {
  if (element_bytes != 2 && element_bytes != 4) {
    return InvalidArgument("elements of a paged cache have 2 or 4 bytes, not " +
                           std::to_string(element_bytes));
  }
  if (order.block_tokens == 0 || order.n_heads == 0) {
    return InvalidArgument("a paged cache has at least one token a block, and one head");
  }
  auto k = SideOf(order.k_offsets, order.block_tokens, "k");
  if (!k.ok()) return k.error();
  auto v = SideOf(order.v_offsets, order.block_tokens, "v");
  if (!v.ok()) return v.error();
  return PagedRows(std::move(order), element_bytes, *k, *v);
}

Status PagedRows::Check(size_t cache_bytes, std::span<const int64_t> blocks, uint32_t first,
                        uint32_t n) const {
  if (n == 0) return {};
  const uint64_t last = (uint64_t{first} + n - 1) / order_.block_tokens;
  if (last >= blocks.size()) {
    return InvalidArgument(
        "tokens " + std::to_string(first) + ".." + std::to_string(uint64_t{first} + n) + " need " +
        std::to_string(last + 1) + " blocks, and the table has " + std::to_string(blocks.size()));
  }
  const uint64_t elements = cache_bytes / element_bytes_;
  const uint64_t heads = (order_.n_heads - 1) * order_.head_stride + std::max(k_.end, v_.end);
  for (uint64_t i = first / order_.block_tokens; i <= last; ++i) {
    if (blocks[i] < 0 || heads > elements ||
        uint64_t(blocks[i]) > (elements - heads) / std::max<uint64_t>(1, order_.block_stride)) {
      return InvalidArgument("block " + std::to_string(blocks[i]) + " lies outside of the cache");
    }
  }
  return {};
}

void PagedRows::Gather(std::span<const std::byte> cache, std::span<const int64_t> blocks,
                       uint32_t first, uint32_t n, std::byte* k, std::byte* v) const {
  auto* places = const_cast<std::byte*>(cache.data());  // one copy loop serves both directions
  CopyElements<false>(element_bytes_, order_, places, blocks, first, n, order_.n_heads, 0u,
                      Rows{k, order_.k_offsets, k_.dim, k_.rows_together});
  CopyElements<false>(element_bytes_, order_, places, blocks, first, n, order_.n_heads, 0u,
                      Rows{v, order_.v_offsets, v_.dim, v_.rows_together});
}

void PagedRows::Scatter(std::span<std::byte> cache, std::span<const int64_t> blocks, uint32_t first,
                        uint32_t n, uint32_t row_heads, uint32_t first_head, const std::byte* k,
                        const std::byte* v) const {
  CopyElements<true>(element_bytes_, order_, cache.data(), blocks, first, n, row_heads, first_head,
                     Rows{const_cast<std::byte*>(k), order_.k_offsets, k_.dim, k_.rows_together});
  CopyElements<true>(element_bytes_, order_, cache.data(), blocks, first, n, row_heads, first_head,
                     Rows{const_cast<std::byte*>(v), order_.v_offsets, v_.dim, v_.rows_together});
}

}  // namespace prefixd::python
