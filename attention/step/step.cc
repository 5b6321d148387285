#include "attention/step/step.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention/estimators/remainder.h"
#include "attention/kernels/kernels.h"
#include "attention/rows/finite_check.h"
#include "attention/rows/limits.h"
#include "attention/rows/padded_queries.h"
#include "attention/rows/row_blocks.h"

namespace prefixd {
namespace {

struct Shape {
  uint32_t key_dim = 0;
  uint32_t value_dim = 0;
  size_t exact = 0;  // |E|
};

// Retrieved rows come first: the estimators address them from the start of each score row.
std::array<NamedRows, 3> ExactSet(const GroupStepInput& in) {
  return {{{"retrieved", in.retrieved}, {"sinks", in.sinks}, {"tail", in.tail}}};
}

Result<Shape> CheckShapes(const GroupStepInput& in, const GroupStepOutput& out) {
  if (in.group == 0 || in.queries.empty() || in.queries.size() % in.group != 0) {
    return InvalidArgument("queries must be [group][key_dim] with at least one head");
  }
  if (out.y.empty() || out.y.size() % in.group != 0 || out.lse.size() != in.group ||
      out.rho_z.size() != in.group) {
    return InvalidArgument("outputs must be y [group][value_dim], lse [group], rho_z [group]");
  }
  if (!in.cuts.empty() && in.cuts.size() != in.group) {
    return InvalidArgument("cuts must be empty or one per query head");
  }
  if (!in.retrieved_scores.empty() && in.retrieved_scores.size() != in.group * in.retrieved.count) {
    return InvalidArgument("retrieved_scores must be empty or [group][retrieved.count]");
  }
  Shape shape;
  shape.key_dim = static_cast<uint32_t>(in.queries.size() / in.group);
  shape.value_dim = static_cast<uint32_t>(out.y.size() / in.group);
  const RowShape* first = nullptr;
  for (const NamedRows& tensor : ExactSet(in)) {
    if (tensor.rows.count == 0) continue;
    const RowShape& row = tensor.rows.shape;
    if (row.key_dim != shape.key_dim || row.value_dim != shape.value_dim) {
      return InvalidArgument(std::string(tensor.name) + " rows are " + std::to_string(row.key_dim) +
                             "+" + std::to_string(row.value_dim) +
                             " elements; queries and outputs want " +
                             std::to_string(shape.key_dim) + "+" + std::to_string(shape.value_dim));
    }
    if (first != nullptr && row.dtype != first->dtype) {
      return InvalidArgument(std::string(tensor.name) +
                             " rows differ in dtype from the other exact rows");
    }
    first = first ? first : &tensor.rows.shape;
    shape.exact += tensor.rows.count;
  }
  return shape;
}

// Returns whether there is a remainder to estimate.
Result<bool> CheckEstimator(const GroupStepInput& in, const Shape& shape) {
  if (in.estimator == EstimatorKind::kNone) return false;
  if (in.estimator == EstimatorKind::kAuto) {
    return InvalidArgument("estimator 'auto' must be resolved before a step");
  }
  if (in.layer.softcap > 0) {
    return InvalidArgument(
        "a layer with a softcap attends exactly or by selection only; "
        "estimator '" +
        std::string(EstimatorName(in.estimator)) + "' was asked for");
  }
  if (in.retrieved.count > in.mid_count) {
    return InvalidArgument(std::to_string(in.retrieved.count) +
                           " retrieved rows; the mid region has " + std::to_string(in.mid_count));
  }
  if (std::ranges::any_of(in.cuts, [](const Cut& cut) { return std::isnan(cut.score); })) {
    return InvalidArgument("a cut is NaN");
  }
  if (in.retrieved.count == in.mid_count) return false;
  PREFIXD_TRY(CheckEstimatorInputs(in, shape.key_dim, shape.value_dim));
  return true;
}

// `known`: [G][rows.count], or empty. sums: null, or added to.
void ScoreRows(const std::vector<double>& q, const GroupStepInput& in, const RowsView& rows,
               std::span<const float> known, float* scores, size_t ld_scores, KeySums* sums) {
  const VectorBlock keys = KeyBlockAhead(rows, 0, rows.count);
  const size_t ldq = PadUp(rows.shape.key_dim);
  if (known.empty() && sums != nullptr) {
    Kernels().score_and_sums(q.data(), ldq, in.group, keys, in.layer.scale, scores, ld_scores,
                             sums->centre.data(), sums->sum.data(), sums->sum_sq.data());
  } else if (known.empty()) {
    Kernels().score(q.data(), ldq, in.group, keys, in.layer.scale, scores, ld_scores);
  } else if (sums != nullptr) {
    Kernels().centred_sums(keys, sums->centre.data(), sums->sum.data(), sums->sum_sq.data());
  }
  for (uint32_t g = 0; g < in.group && !known.empty(); ++g) {
    std::copy_n(known.begin() + static_cast<ptrdiff_t>(g * rows.count), rows.count,
                scores + g * ld_scores);
  }
}

// scores: [G][n_exact]; max: [G]. key_sums: receives sums over the retrieved rows, or null.
Status ScoreExactSet(const GroupStepInput& in, const Shape& shape, std::span<float> scores,
                     std::span<float> max, KeySums* key_sums) {
  const std::vector<double> q = PadQueries<double>(in.queries, in.group, shape.key_dim);
  size_t offset = 0;
  for (const NamedRows& tensor : ExactSet(in)) {
    if (tensor.rows.count == 0) continue;
    const bool retrieved = offset == 0 && in.retrieved.count > 0;
    ScoreRows(q, in, tensor.rows, retrieved ? in.retrieved_scores : std::span<const float>{},
              scores.data() + offset, shape.exact, retrieved ? key_sums : nullptr);
    offset += tensor.rows.count;
  }
  for (uint32_t g = 0; g < in.group; ++g) {
    float* row = scores.data() + g * shape.exact;
    const bool finite = Kernels().finite_max(row, shape.exact, &max[g]);
    if (!finite) return ExplainNonFinite(ExactSet(in));
    if (in.layer.softcap > 0) {
      Kernels().softcap(row, shape.exact, in.layer.softcap);
      Kernels().finite_max(row, shape.exact, &max[g]);
    }
  }
  return {};
}

// Holds the scores, and the estimate made from them.
struct Scored {
  bool estimate = false;
  std::vector<float> scores;  // [G][n_exact]
  std::vector<float> max;     // [G]
  Remainder remainder;
};

Result<Scored> ScoreAndEstimate(const GroupStepInput& in, const Shape& shape) {
  Scored out;
  PREFIXD_ASSIGN(out.estimate, CheckEstimator(in, shape));
  PREFIXD_TRY(CheckQueries(in.queries, in.group, shape.key_dim));
  KeySums key_sums;
  const bool sums = out.estimate && NeedsKeySums(in);
  if (sums) {
    key_sums.centre.assign(in.moment->mean_key().begin(), in.moment->mean_key().end());
    key_sums.sum.resize(shape.key_dim);
    key_sums.sum_sq.resize(shape.key_dim);
  }
  out.scores.resize(in.group * shape.exact);
  out.max.resize(in.group);
  PREFIXD_TRY(ScoreExactSet(in, shape, out.scores, out.max, sums ? &key_sums : nullptr));
  if (out.estimate) {
    out.remainder =
        Estimate({in, shape.key_dim, shape.value_dim, out.scores.data(), shape.exact, key_sums});
  }
  return out;
}

double Coefficient(const Scored& scored, uint32_t g, size_t i, size_t k) {
  const Remainder& remainder = scored.remainder;
  if (remainder.line.empty()) return remainder.coefficient[g * k + i];
  const Line& line = remainder.line[g];
  const float score = scored.scores[g * (scored.scores.size() / scored.max.size()) + i];
  return line.first + line.slope * (score - line.centre);
}

// Turns the scores of one head, the k retrieved rows' first, into weights under `shift`: exp(s_i),
// less what the estimate of mass z_r still counts for the retrieved rows. Returns the sum of
// exp(s_i).
double SignedWeights(const Remainder& remainder, uint32_t g, size_t k, double z_r, float shift,
                     std::span<float> row) {
  const float mass = static_cast<float>(z_r);
  if (z_r > 0 && !remainder.line.empty()) {
    const Line& line = remainder.line[g];
    const Line scaled = {mass * line.first, mass * line.slope, line.centre};
    return Kernels().exp_less_line(row.data(), k, shift, scaled, row.data()) +
           Kernels().exp_shifted(row.data() + k, row.size() - k, shift, row.data() + k);
  }
  const double z_e = Kernels().exp_shifted(row.data(), row.size(), shift, row.data());
  if (z_r > 0) {
    const float* coefficient = remainder.coefficient.data() + g * k;
    for (size_t i = 0; i < k; ++i) row[i] -= mass * coefficient[i];
  }
  return z_e;
}

}  // namespace

Status GroupStep(const GroupStepInput& in, const GroupStepOutput& out) {
  PREFIXD_ASSIGN(const Shape shape, CheckShapes(in, out));
  PREFIXD_ASSIGN(Scored scored, ScoreAndEstimate(in, shape));
  const Remainder& remainder = scored.remainder;
  std::vector<float>& weights = scored.scores;

  // Scores become signed weights under one shift per head: exp(s_i) of the exact part, less what
  // the estimate still counts for the retrieved rows.
  const size_t k = in.retrieved.count;
  std::vector<double> acc(size_t{in.group} * shape.value_dim);
  std::vector<double> z(in.group);
  bool finite = true;
  for (uint32_t g = 0; g < in.group; ++g) {
    const double log_z_r = scored.estimate ? remainder.log_z[g] : -kInf;
    const bool merged = in.merge_estimate && log_z_r != -kInf;
    const double shift = merged ? std::max(double{scored.max[g]}, log_z_r) : scored.max[g];
    if (shift == -kInf) {  // nothing is stored at all
      out.lse[g] = -std::numeric_limits<float>::infinity();
      out.rho_z[g] = log_z_r == -kInf ? 0 : 1;
      continue;
    }
    const float float_shift = static_cast<float>(shift);
    float* row = weights.data() + g * shape.exact;
    const double z_r = merged ? std::exp(log_z_r - float_shift) : 0.0;
    const double z_e = SignedWeights(remainder, g, k, z_r, float_shift, {row, shape.exact});
    if (z_r > 0) {
      for (uint32_t l = 0; l < shape.value_dim; ++l) {
        const size_t at = size_t{g} * shape.value_dim + l;
        acc[at] = z_r * remainder.constant[at];
      }
    }
    z[g] = z_e + z_r;
    out.lse[g] = static_cast<float>(double{float_shift} + std::log(z[g]));
    // The share is computed in logs, because a dropped remainder may be far above what was read.
    out.rho_z[g] = static_cast<float>(1 / (1 + std::exp(float_shift + std::log(z_e) - log_z_r)));
    // A summary may hold numbers that no rows lead to, and make the estimate not finite.
    finite = finite && out.lse[g] < kInf && !std::isnan(out.rho_z[g]);
  }

  size_t offset = 0;
  for (const NamedRows& tensor : ExactSet(in)) {
    const RowsView& rows = tensor.rows;
    if (rows.count == 0) continue;
    Kernels().weighted_sum(weights.data() + offset, shape.exact, in.group,
                           ValueBlockAhead(rows, 0, rows.count), acc.data(), shape.value_dim);
    offset += rows.count;
  }
  for (uint32_t g = 0; g < in.group; ++g) {
    for (uint32_t l = 0; l < shape.value_dim; ++l) {
      const size_t at = size_t{g} * shape.value_dim + l;
      out.y[at] = z[g] > 0 ? static_cast<float>(acc[at] / z[g]) : 0.0f;
      finite = finite && std::isfinite(out.y[at]);
    }
  }
  if (!finite) return ExplainNonFinite(ExactSet(in));
  return {};
}

void StepScores(std::span<const float> queries, uint32_t group, const LayerGeometry& layer,
                const RowsView& rows, std::span<float> scores) {
  StepScores(queries, group, layer, rows, 0, rows.count, scores);
}

void StepScores(std::span<const float> queries, uint32_t group, const LayerGeometry& layer,
                const RowsView& rows, size_t begin, size_t n, std::span<float> scores) {
  const uint32_t dim = rows.shape.key_dim;
  assert(queries.size() == size_t{group} * dim && scores.size() == group * rows.count);
  assert(begin + n <= rows.count);
  if (n == 0) return;
  const std::vector<double> q = PadQueries<double>(queries, group, dim);
  Kernels().score(q.data(), PadUp(dim), group, KeyBlockAhead(rows, begin, n), layer.scale,
                  scores.data() + begin, rows.count);
}

Status EstimateRemainder(const GroupStepInput& in, std::span<float> log_z, std::span<float> y) {
  std::vector<float> lse(in.group), rho_z(in.group);
  PREFIXD_ASSIGN(const Shape shape, CheckShapes(in, {y, lse, rho_z}));
  if (log_z.size() != in.group) return InvalidArgument("log_z must be [group]");
  PREFIXD_ASSIGN(const Scored scored, ScoreAndEstimate(in, shape));
  const size_t k = in.retrieved.count;
  std::vector<float> value(shape.value_dim);
  std::vector<double> sum(y.size());
  if (scored.estimate) sum = scored.remainder.constant;
  for (size_t i = 0; i < k && scored.estimate; ++i) {
    ToFloat(in.retrieved.shape.dtype, in.retrieved.value(i), value);
    for (uint32_t g = 0; g < in.group; ++g) {
      const double coefficient = Coefficient(scored, g, i, k);
      for (uint32_t l = 0; l < shape.value_dim; ++l) {
        sum[size_t{g} * shape.value_dim + l] -= coefficient * value[l];
      }
    }
  }
  for (uint32_t g = 0; g < in.group; ++g) {
    log_z[g] = scored.estimate ? static_cast<float>(scored.remainder.log_z[g])
                               : -std::numeric_limits<float>::infinity();
  }
  bool finite = true;
  for (size_t at = 0; at < y.size(); ++at) {
    y[at] = static_cast<float>(sum[at]);
    finite = finite && std::isfinite(y[at]);
  }
  if (!finite) return ExplainNonFinite(ExactSet(in));
  return {};
}

}  // namespace prefixd
