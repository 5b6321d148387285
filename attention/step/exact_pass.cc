#include "attention/step/exact_pass.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/kernels/kernels.h"
#include "attention/rows/finite_check.h"
#include "attention/rows/row_blocks.h"

namespace prefixd {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr size_t kBlockRows = 64;  // rows scored, then summed, while still in the first-level cache
constexpr size_t kSuperRows = 1024;  // rows in the second-level cache over all tiles of queries
constexpr size_t kTileQueries = 32;

}  // namespace

Status ExactPass::Begin(std::span<const float> queries, uint32_t n_queries,
                        const LayerGeometry& layer, const RowShape& shape) {
  if (queries.size() != size_t{n_queries} * shape.key_dim) {
    return InvalidArgument("exact attention: queries must be [n][key_dim]");
  }
  PREFIXD_TRY(CheckQueries(queries, n_queries, shape.key_dim));
  layer_ = layer;
  shape_ = shape;
  n_ = n_queries;
  const size_t ldq = PadUp(shape.key_dim);
  q_.assign(n_ * ldq, 0);
  for (size_t i = 0; i < n_; ++i) {
    std::copy_n(queries.data() + i * shape.key_dim, shape.key_dim, q_.data() + i * ldq);
  }
  scores_.resize(std::max(scores_.size(), std::min(kTileQueries, n_) * kBlockRows));
  max_.assign(n_, kMinusInf);
  sum_.assign(n_, 0);
  acc_.assign(n_ * shape.value_dim, 0);
  return {};
}

bool ExactPass::AddBlock(size_t first, size_t n, const RowsView& rows, size_t ahead) {
  const size_t ldq = PadUp(shape_.key_dim);
  VectorBlock keys = KeyBlockAhead(rows, 0, rows.count);
  keys.ahead = ahead;
  keys.in_runs = true;
  Kernels().score(q_.data() + first * ldq, ldq, n, keys, layer_.scale, scores_.data(), kBlockRows);
  for (size_t g = 0; g < n; ++g) {
    float* row = scores_.data() + g * kBlockRows;
    float max = kMinusInf;
    if (!Kernels().finite_max(row, rows.count, &max)) return false;
    if (layer_.softcap > 0) {
      Kernels().softcap(row, rows.count, layer_.softcap);
      Kernels().finite_max(row, rows.count, &max);
    }
    float& running = max_[first + g];
    double& sum = sum_[first + g];
    if (max > running) {
      const double shrink = std::exp(double{running} - double{max});
      double* acc = acc_.data() + (first + g) * shape_.value_dim;
      for (uint32_t l = 0; l < shape_.value_dim; ++l) acc[l] *= shrink;
      sum *= shrink;
      running = max;
    }
    sum += Kernels().exp_shifted(row, rows.count, running, row);
  }
  Kernels().weighted_sum(scores_.data(), kBlockRows, n, ValueBlock(rows, 0, rows.count),
                         acc_.data() + first * shape_.value_dim, shape_.value_dim);
  return true;
}

bool ExactPass::Add(const RowsView& rows) {
  for (size_t super = 0; super < rows.count; super += kSuperRows) {
    const size_t super_end = std::min(rows.count, super + kSuperRows);
    for (size_t first = 0; first < n_; first += kTileQueries) {
      const size_t n = std::min(kTileQueries, n_ - first);
      for (size_t begin = super; begin < super_end; begin += kBlockRows) {
        const RowsView block = rows.Sub(begin, std::min(kBlockRows, super_end - begin));
        if (!AddBlock(first, n, block, rows.count - begin)) return false;
      }
    }
  }
  return true;
}

bool ExactPass::Finish(std::span<float> y, std::span<float> lse) const {
  bool finite = true;
  for (size_t g = 0; g < n_; ++g) {
    const double sum = sum_[g];
    lse[g] = sum > 0 ? static_cast<float>(max_[g] + std::log(sum)) : kMinusInf;
    for (uint32_t l = 0; l < shape_.value_dim; ++l) {
      const size_t at = g * shape_.value_dim + l;
      y[at] = sum > 0 ? static_cast<float>(acc_[at] / sum) : 0.0f;
      finite = finite && std::isfinite(y[at]);
    }
  }
  return finite;
}

}  // namespace prefixd
