// Computes exact attention of some queries over rows that come in several runs, in buffers that are
// kept from one pass to the next.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "attention/rows/rows.h"
#include "prefixd/kv_shape.h"
#include "prefixd/result.h"

namespace prefixd {

class ExactPass {
 public:
  // Begins with no rows. queries: [n_queries][key_dim], copied. kInvalidArgument: their size, NaN
  // or Inf.
  Status Begin(std::span<const float> queries, uint32_t n_queries, const LayerGeometry& layer,
               const RowShape& shape);
  // Attends over these rows, too. False when a score is not finite; the pass is then of no use.
  [[nodiscard]] bool Add(const RowsView& rows);
  // y: [n_queries][value_dim], lse: [n_queries]; 0 and -inf without rows. False when an output is
  // not finite.
  [[nodiscard]] bool Finish(std::span<float> y, std::span<float> lse) const;

  // The memory of its buffers.
  size_t bytes() const {
    return (q_.capacity() + sum_.capacity() + acc_.capacity()) * sizeof(double) +
           (scores_.capacity() + max_.capacity()) * sizeof(float);
  }

 private:
  // Adds a block of rows to the states of queries [first, first + n). `ahead`: rows from the
  // block's start on that may be prefetched.
  bool AddBlock(size_t first, size_t n, const RowsView& rows, size_t ahead);

  LayerGeometry layer_;
  RowShape shape_;
  size_t n_ = 0;
  std::vector<double> q_;  // [n][PadUp(key_dim)]
  std::vector<float> scores_;
  // (max, sum, unnormalised output) of each query over the rows so far; sums in float64.
  std::vector<float> max_;
  std::vector<double> sum_, acc_;  // acc: [n][value_dim]
};

}  // namespace prefixd
