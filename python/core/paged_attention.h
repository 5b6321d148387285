// Attends to the tokens that an engine holds in the blocks of its paged cache, and returns the
// normaliser with the result, which engines' kernels for CPUs keep to themselves: an engine that
// attends over a stored prefix merges the two states.
//
// Thread-safety: const after Create.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/result.h"
#include "python/core/paged_rows.h"

namespace prefixd::python {

// Tokens [first, tokens) of one sequence, and the queries of the last `queries` of them: each sees
// the tokens up to its own. Those before `first` need no blocks.
struct PagedQueries {
  uint32_t first = 0, tokens = 0, queries = 0;
  std::span<const int64_t> blocks;  // blocks[i] has tokens [i * block_tokens, (i + 1) * ...)
  const float* q = nullptr;         // [queries][n_q_heads][key_dim]
  float* y = nullptr;               // out: [queries][n_q_heads][value_dim]
  float* lse = nullptr;             // out: [queries][n_q_heads], natural log
};

class PagedAttention {
 public:
  // kInvalidArgument when the elements have another size than `dtype`. `rows` is borrowed.
  static Result<PagedAttention> Create(const PagedRows& rows, DType dtype);

  // Attends in float32, for all sequences; n_q_heads is a multiple of the cache's heads.
  // kInvalidArgument for tables that do not cover the tokens (PagedRows::Check), and for sequences
  // with fewer tokens than queries; nothing is written then. On up to `threads` threads where there
  // is enough to do.
  Status Attend(std::span<const std::byte> cache, const LayerGeometry& layer, uint32_t n_q_heads,
                std::span<const PagedQueries> sequences, uint32_t threads) const;

 private:
  PagedAttention(const PagedRows& rows, DType dtype);

  // Keys by dimension and values by token of one block and head, as float32: in place where they
  // lie so, else in `scratch`.
  struct Tile {
    std::vector<const float*> keys;    // [key_dim], each [tokens]
    std::vector<const float*> values;  // [tokens], each [value_dim]
    std::vector<float> scratch;
    std::vector<std::byte> bits;
  };
  void Load(const std::byte* head, uint32_t tokens, Tile* tile) const;
  void AttendHead(std::span<const std::byte> cache, const LayerGeometry& layer, uint32_t n_q_heads,
                  const PagedQueries& sequence, uint32_t first, uint32_t n, uint32_t head,
                  Tile* tile) const;

  const PagedRows* rows_;
  DType dtype_;
  bool keys_in_place_, values_in_place_;
};

}  // namespace prefixd::python
