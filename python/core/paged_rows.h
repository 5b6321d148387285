// Moves rows between a store's order ([token][head][dim]) and the paged cache of an engine, whose
// blocks hold some tokens each and whose elements lie in an order of the engine's own: kernels pack
// keys as their instruction set likes it. An order is a table with the place of each element of one
// block and head, so that any packing needs no code of its own.
//
// Thread-safety: const after Create.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "prefixd/result.h"

namespace prefixd::python {

// Places are counted in elements. An element of a block and head is at
// block * block_stride + head * head_stride + offsets[token * dim + d].
struct PagedOrder {
  uint64_t block_stride = 0, head_stride = 0;
  uint32_t block_tokens = 0, n_heads = 0;
  std::vector<uint64_t> k_offsets, v_offsets;  // [block_tokens][key_dim], [block_tokens][value_dim]
};

class PagedRows {
 public:
  // element_bytes: 2 or 4. kInvalidArgument for tables that do not fit the sizes.
  static Result<PagedRows> Create(PagedOrder order, uint32_t element_bytes);

  uint32_t block_tokens() const { return order_.block_tokens; }
  uint32_t n_heads() const { return order_.n_heads; }
  size_t key_bytes() const { return k_.dim * element_bytes_; }  // of one token and head
  size_t value_bytes() const { return v_.dim * element_bytes_; }
  uint32_t element_bytes() const { return element_bytes_; }
  uint32_t key_dim() const { return k_.dim; }
  uint32_t value_dim() const { return v_.dim; }
  const PagedOrder& order() const { return order_; }

  // kInvalidArgument unless `blocks` covers tokens [first, first + n) and all its places that they
  // need lie in a cache of `cache_bytes`.
  Status Check(size_t cache_bytes, std::span<const int64_t> blocks, uint32_t first,
               uint32_t n) const;

  // Copies the rows of tokens [first, first + n) out of the cache; blocks[i] is the block of tokens
  // [i * block_tokens, (i + 1) * block_tokens). k and v are [n][n_heads][dim]. Check must have
  // passed.
  void Gather(std::span<const std::byte> cache, std::span<const int64_t> blocks, uint32_t first,
              uint32_t n, std::byte* k, std::byte* v) const;

  // Copies rows into the cache. They have `row_heads` heads a token, of which the cache's are those
  // from `first_head` on.
  void Scatter(std::span<std::byte> cache, std::span<const int64_t> blocks, uint32_t first,
               uint32_t n, uint32_t row_heads, uint32_t first_head, const std::byte* k,
               const std::byte* v) const;

 private:
  struct Side {
    uint32_t dim = 0;
    uint64_t end = 0;            // behind the last place of a block and head
    bool rows_together = false;  // each token's elements follow one another
  };

  PagedRows(PagedOrder order, uint32_t element_bytes, Side k, Side v)
      : order_(std::move(order)), element_bytes_(element_bytes), k_(k), v_(v) {}

  static Result<Side> SideOf(const std::vector<uint64_t>& offsets, uint32_t block_tokens,
                             const char* name);

  PagedOrder order_;
  uint32_t element_bytes_;
  Side k_, v_;
};

}  // namespace prefixd::python
