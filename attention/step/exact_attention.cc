// Computes exact attention in one streaming pass, plain scores, and the merge of partial states.
#include <array>
#include <cassert>
#include <string>
#include <vector>

#include "attention/kernels/kernels.h"
#include "attention/rows/finite_check.h"
#include "attention/rows/padded_queries.h"
#include "attention/rows/row_blocks.h"
#include "attention/step/exact_pass.h"
#include "attention/step/step.h"

namespace prefixd {
Status ExactAttention(std::span<const float> queries, uint32_t n_queries,
                      const LayerGeometry& layer, const RowsView& rows, std::span<float> y,
                      std::span<float> lse) {
  const RowShape& shape = rows.shape;
  if (queries.size() != size_t{n_queries} * shape.key_dim ||
      y.size() != size_t{n_queries} * shape.value_dim || lse.size() != n_queries) {
    return InvalidArgument("exact attention: queries must be [n][" + std::to_string(shape.key_dim) +
                           "], y [n][" + std::to_string(shape.value_dim) + "], lse [n]");
  }
  ExactPass pass;
  PREFIXD_TRY(pass.Begin(queries, n_queries, layer, shape));
  if (pass.Add(rows) && pass.Finish(y, lse)) return {};
  const std::array<NamedRows, 1> named = {{{"rows", rows}}};
  return ExplainNonFinite(named);
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
