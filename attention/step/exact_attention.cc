// Computes exact attention in one streaming pass, plain scores, and the merge of partial states.
#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention/kernels/kernels.h"
#include "attention/rows/finite_check.h"
#include "attention/rows/padded_queries.h"
#include "attention/rows/row_blocks.h"
#include "attention/step/step.h"

namespace prefixd {
namespace {

constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
constexpr size_t kBlockRows = 64;  // rows scored, then summed, while still in the first-level cache
constexpr size_t kSuperRows = 1024;  // rows in the second-level cache over all tiles of queries
constexpr size_t kTileQueries = 32;

// Keeps (max, sum, unnormalised output) of each query over the rows seen so far; sums in float64.
struct RunningStates {
  RunningStates(size_t n, uint32_t value_dim) : max(n, kMinusInf), sum(n), acc(n * value_dim) {}
  std::vector<float> max;
  std::vector<double> sum;
  std::vector<double> acc;  // [n][value_dim]
};

// Adds at most kBlockRows rows to the states of queries [first, first + n). `ahead`: rows from the
// block's start on that may be prefetched. False when a score is not finite.
bool AddBlock(const double* q, size_t first, size_t n, const LayerGeometry& layer,
              const RowsView& rows, size_t ahead, float* scores, RunningStates& states) {
  const RowShape& shape = rows.shape;
  const size_t ldq = PadUp(shape.key_dim);
  VectorBlock keys = KeyBlockAhead(rows, 0, rows.count);
  keys.ahead = ahead;
  keys.in_runs = true;
  Kernels().score(q + first * ldq, ldq, n, keys, layer.scale, scores, kBlockRows);
  for (size_t g = 0; g < n; ++g) {
    float* row = scores + g * kBlockRows;
    float max = kMinusInf;
    if (!Kernels().finite_max(row, rows.count, &max)) return false;
    if (layer.softcap > 0) {
      Kernels().softcap(row, rows.count, layer.softcap);
      Kernels().finite_max(row, rows.count, &max);
    }
    float& running = states.max[first + g];
    double& sum = states.sum[first + g];
    if (max > running) {
      const double shrink = std::exp(double{running} - double{max});
      double* acc = states.acc.data() + (first + g) * shape.value_dim;
      for (uint32_t l = 0; l < shape.value_dim; ++l) acc[l] *= shrink;
      sum *= shrink;
      running = max;
    }
    sum += Kernels().exp_shifted(row, rows.count, running, row);
  }
  Kernels().weighted_sum(scores, kBlockRows, n, ValueBlock(rows, 0, rows.count),
                         states.acc.data() + first * shape.value_dim, shape.value_dim);
  return true;
}

}  // namespace

Status ExactAttention(std::span<const float> queries, uint32_t n_queries,
                      const LayerGeometry& layer, const RowsView& rows, std::span<float> y,
                      std::span<float> lse) {
  const RowShape& shape = rows.shape;
  if (queries.size() != size_t{n_queries} * shape.key_dim ||
      y.size() != size_t{n_queries} * shape.value_dim || lse.size() != n_queries) {
    return InvalidArgument("exact attention: queries must be [n][" + std::to_string(shape.key_dim) +
                           "], y [n][" + std::to_string(shape.value_dim) + "], lse [n]");
  }
  PREFIXD_TRY(CheckQueries(queries, n_queries, shape.key_dim));
  const std::array<NamedRows, 1> named = {{{"rows", rows}}};
  const std::vector<double> q = PadQueries<double>(queries, n_queries, shape.key_dim);
  std::vector<float> scores(std::min<size_t>(kTileQueries, n_queries) * kBlockRows);
  RunningStates states(n_queries, shape.value_dim);

  for (size_t super = 0; super < rows.count; super += kSuperRows) {
    const size_t super_end = std::min(rows.count, super + kSuperRows);
    for (size_t first = 0; first < n_queries; first += kTileQueries) {
      const size_t n = std::min<size_t>(kTileQueries, n_queries - first);
      for (size_t begin = super; begin < super_end; begin += kBlockRows) {
        const RowsView block = rows.Sub(begin, std::min(kBlockRows, super_end - begin));
        if (!AddBlock(q.data(), first, n, layer, block, rows.count - begin, scores.data(),
                      states)) {
          return ExplainNonFinite(named);
        }
      }
    }
  }

  bool finite = true;
  for (size_t g = 0; g < n_queries; ++g) {
    const double sum = states.sum[g];
    lse[g] = sum > 0 ? static_cast<float>(states.max[g] + std::log(sum)) : kMinusInf;
    for (uint32_t l = 0; l < shape.value_dim; ++l) {
      const size_t at = g * shape.value_dim + l;
      y[at] = sum > 0 ? static_cast<float>(states.acc[at] / sum) : 0.0f;
      finite = finite && std::isfinite(y[at]);
    }
  }
  if (!finite) return ExplainNonFinite(named);
  return {};
}

void Scores(std::span<const float> queries, uint32_t group, const LayerGeometry& layer,
            const RowsView& rows, std::span<float> scores, size_t ld) {
  const uint32_t key_dim = rows.shape.key_dim;
  if (rows.count == 0 || group == 0) return;
  assert(queries.size() == size_t{group} * key_dim && ld >= rows.count &&
         scores.size() >= (group - 1) * ld + rows.count);
  const std::vector<float> q = PadQueries<float>(queries, group, key_dim);
  VectorBlock keys = KeyBlockAhead(rows, 0, rows.count);
  keys.ahead_value_bytes = 0;  // the values are not read
  Kernels().dot(q.data(), PadUp(key_dim), group, keys, layer.scale, scores.data(), ld);
  for (uint32_t g = 0; layer.softcap > 0 && g < group; ++g) {
    Kernels().softcap(scores.data() + g * ld, rows.count, layer.softcap);
  }
}

}  // namespace prefixd
