#include "attention/step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention/finite_check.h"
#include "attention/kernels.h"
#include "attention/padded_queries.h"
#include "attention/remainder.h"

namespace prefixd {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

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

Status CheckMoment(const GroupStepInput& in, const Shape& shape) {
  const MomentSummary& moment = *in.moment;
  if (moment.key_dim() != shape.key_dim || moment.value_dim() != shape.value_dim ||
      moment.count() != in.mid_count) {
    return InvalidArgument("the moment summary is of " + std::to_string(moment.count()) +
                           " tokens of " + std::to_string(moment.key_dim()) + "+" +
                           std::to_string(moment.value_dim()) + "; the mid region has " +
                           std::to_string(in.mid_count) + " of " + std::to_string(shape.key_dim) +
                           "+" + std::to_string(shape.value_dim));
  }
  return {};
}

Status CheckPhi(const GroupStepInput& in, const Shape& shape) {
  if (in.phi == nullptr || in.phi_k == nullptr || in.phi_q.size() != in.group) {
    return InvalidArgument("the phi estimator needs a cache, phi_k and one phi_q per query head");
  }
  const PhiCache& phi = *in.phi;
  const auto fits = [&](const FeatureMap& map) {
    return map.in_dim == shape.key_dim && map.d_phi == phi.d_phi();
  };
  if (phi.value_dim() != shape.value_dim || !fits(*in.phi_k) ||
      !std::ranges::all_of(in.phi_q, fits)) {
    return InvalidArgument("the phi cache, its maps and the rows disagree in dimensions");
  }
  if (phi.count() != in.mid_count) {
    return InvalidArgument("the phi cache is of " + std::to_string(phi.count()) +
                           " tokens; the mid region has " + std::to_string(in.mid_count));
  }
  return {};
}

// True when there is a remainder to estimate.
Result<bool> CheckEstimator(const GroupStepInput& in, const Shape& shape) {
  if (in.estimator == EstimatorKind::kNone) return false;
  if (in.estimator != EstimatorKind::kMoment && in.estimator != EstimatorKind::kPhi) {
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
  if (in.estimator == EstimatorKind::kMoment && in.moment == nullptr) {
    return InvalidArgument("the moment estimator needs a moment summary");
  }
  if (in.moment != nullptr) PREFIXD_TRY(CheckMoment(in, shape));
  if (in.estimator == EstimatorKind::kPhi) PREFIXD_TRY(CheckPhi(in, shape));
  return true;
}

// scores: [G][n_exact]; max: [G].
Status ScoreExactSet(const GroupStepInput& in, const Shape& shape, std::span<float> scores,
                     std::span<float> max) {
  const std::vector<double> q = PadQueries<double>(in.queries, in.group, shape.key_dim);
  size_t offset = 0;
  for (const NamedRows& tensor : ExactSet(in)) {
    const RowsView& rows = tensor.rows;
    if (rows.count == 0) continue;
    Kernels().score(q.data(), PadUp(shape.key_dim), in.group,
                    {rows.data, rows.stride, rows.count, shape.key_dim, rows.shape.dtype,
                     rows.count, rows.shape.bytes()},
                    in.layer.scale, scores.data() + offset, shape.exact);
    offset += rows.count;
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

}  // namespace

Status GroupStep(const GroupStepInput& in, const GroupStepOutput& out) {
  PREFIXD_ASSIGN(const Shape shape, CheckShapes(in, out));
  PREFIXD_ASSIGN(const bool estimate, CheckEstimator(in, shape));
  PREFIXD_TRY(CheckQueries(in.queries, in.group, shape.key_dim));

  std::vector<float> weights(in.group * shape.exact), max(in.group);
  PREFIXD_TRY(ScoreExactSet(in, shape, weights, max));
  Remainder remainder;
  if (estimate) {
    const RemainderContext context = {in, shape.key_dim, shape.value_dim, weights.data(),
                                      shape.exact};
    remainder =
        in.estimator == EstimatorKind::kMoment ? EstimateMoment(context) : EstimatePhi(context);
  }

  // Scores become signed weights under one shift per head: exp(s_i) of the exact part, less what
  // the estimate still counts of the retrieved rows.
  const size_t k = in.retrieved.count;
  std::vector<double> acc(size_t{in.group} * shape.value_dim);
  std::vector<double> z(in.group);
  for (uint32_t g = 0; g < in.group; ++g) {
    const double log_z_r = estimate ? remainder.log_z[g] : -kInf;
    const double shift = std::max(double{max[g]}, log_z_r);
    if (shift == -kInf) {  // nothing stored at all
      out.lse[g] = -std::numeric_limits<float>::infinity();
      out.rho_z[g] = 0;
      continue;
    }
    const float float_shift = static_cast<float>(shift);
    float* row = weights.data() + g * shape.exact;
    const double z_e = Kernels().exp_shifted(row, shape.exact, float_shift, row);
    const double z_r = std::exp(log_z_r - float_shift);
    if (z_r > 0) {
      const float* coefficient = remainder.coefficient.data() + g * k;
      for (size_t i = 0; i < k; ++i) {
        row[i] = static_cast<float>(double{row[i]} - z_r * coefficient[i]);
      }
      for (uint32_t l = 0; l < shape.value_dim; ++l) {
        const size_t at = size_t{g} * shape.value_dim + l;
        acc[at] = z_r * remainder.constant[at];
      }
    }
    z[g] = z_e + z_r;
    out.lse[g] = static_cast<float>(double{float_shift} + std::log(z[g]));
    out.rho_z[g] = static_cast<float>(z_r / z[g]);
  }

  size_t offset = 0;
  for (const NamedRows& tensor : ExactSet(in)) {
    const RowsView& rows = tensor.rows;
    if (rows.count == 0) continue;
    Kernels().weighted_sum(
        weights.data() + offset, shape.exact, in.group,
        {rows.value(0), rows.stride, rows.count, shape.value_dim, rows.shape.dtype}, acc.data(),
        shape.value_dim);
    offset += rows.count;
  }
  bool finite = true;
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

}  // namespace prefixd
