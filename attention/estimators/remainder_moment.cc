// Estimates the remainder by tilted moments (docs/mathematics.md, "The tilted-moment estimator").
#include <algorithm>
#include <cmath>

#include "attention/estimators/remainder.h"
#include "attention/estimators/tilt.h"
#include "attention/kernels/kernels.h"

namespace prefixd {
namespace {

// Returns the variance of each key channel over the remainder, from centred sums, so that a large
// common mean cancels before anything is squared.
std::vector<double> RemainderKeyVariance(const RemainderContext& context) {
  const MomentSummary& moment = *context.in.moment;
  const KeySums& sums = context.key_sums;
  const double k = static_cast<double>(context.k()), r = context.remaining();
  const double of_each = 1 / r;
  std::vector<double> variance(context.key_dim);
  for (uint32_t j = 0; j < context.key_dim; ++j) {
    // Moves the sums from the float32 centre to the mean itself.
    const double off = moment.mean_key()[j] - double{sums.centre[j]};
    const double d = sums.sum[j] - k * off;
    const double d2 = sums.sum_sq[j] - 2 * off * sums.sum[j] + k * off * off;
    const double m2 = moment.key_m2()[j] - d2 - d * d * of_each;
    // A single token has no variance, whatever rounding yields.
    const bool spread = r > 1 && m2 > kNegligibleSpread * moment.key_m2()[j];
    variance[j] = spread ? m2 * of_each : 0.0;
  }
  return variance;
}

double DiagonalVariance(const RemainderContext& context, uint32_t g,
                        const std::vector<double>& key_variance) {
  const std::span<const float> q = context.query(g);
  const double scale = context.in.layer.scale;
  return SumOf(context.key_dim, [&](size_t j) {
    const double weight = scale * q[j];
    return weight * weight * key_variance[j];
  });
}

// The full covariance gives the score's variance over the mid region, and the retrieved rows leave
// it by their scores alone.
double FullVariance(const RemainderContext& context, uint32_t g, const ScoreMean& mean) {
  const std::span<const float> q = context.query(g);
  const std::span<const double> covariance = context.in.moment->covariance();
  const double r = context.remaining();
  const std::vector<double> weights(q.begin(), q.end());
  std::vector<double> along(context.key_dim);
  Kernels().combine(weights.data(), weights.size(), covariance.data(), along.size(), along.data());
  double m2 = 0;
  for (uint32_t j = 0; j < context.key_dim; ++j) m2 += q[j] * along[j];
  m2 *= double{context.in.layer.scale} * context.in.layer.scale;
  double left = m2 - mean.retrieved_sum * mean.retrieved_sum / r;
  for (float s : context.scores_of(g)) left -= (s - mean.of_mid) * (s - mean.of_mid);
  return r > 1 && left > kNegligibleSpread * m2 ? left / r : 0.0;
}

// Buffers that one head after the other uses.
struct CrossRoom {
  std::vector<double> weights, along, cross;  // [key_dim], [rank], [value_dim]
};

// Computes scale q^T C of the whole mid region into room.cross [value_dim]. False without C.
bool QueryCross(const RemainderContext& context, uint32_t g, CrossRoom& room) {
  const MomentSummary& moment = *context.in.moment;
  const std::span<const float> q = context.query(g);
  const double scale = context.in.layer.scale;
  const uint32_t rank = moment.cross_rank();
  auto& [weights, along, out] = room;
  out.assign(context.value_dim, 0.0);
  weights.assign(q.begin(), q.end());
  for (double& w : weights) w *= scale;
  if (moment.has_cross()) {
    Kernels().combine(weights.data(), weights.size(), moment.cross().data(), out.size(),
                      out.data());
    return true;
  }
  along.assign(rank, 0.0);
  Kernels().combine(weights.data(), weights.size(), moment.key_factor().data(), rank, along.data());
  Kernels().combine(along.data(), rank, moment.value_factor().data(), out.size(), out.data());
  return rank > 0;
}

}  // namespace

Remainder EstimateMoment(const RemainderContext& context) {
  const GroupStepInput& in = context.in;
  const MomentSummary& moment = *in.moment;
  const double r = context.remaining();
  const double kept = 1 + static_cast<double>(context.k()) / r;  // |M| / |R|
  Remainder out = EmptyLines(context);
  const bool full = moment.has_covariance();
  const std::vector<double> key_variance =
      full ? std::vector<double>() : RemainderKeyVariance(context);
  CrossRoom room;

  for (uint32_t g = 0; g < context.group(); ++g) {
    const ScoreMean mean = RemoveRetrieved(context, g);
    const double variance =
        full ? FullVariance(context, g, mean) : DiagonalVariance(context, g, key_variance);
    const Cut cut = context.cut(g);
    const double c = TiltCut(cut, mean.of_remainder, std::sqrt(variance), r);
    const Tilt tilt = TiltScores(mean.of_remainder, variance, c);
    out.log_z[g] = ClampToBracket(std::log(r) + tilt.log_mean, cut, mean.of_remainder, r);

    // y_R = vbar_R + lever/r * S_R with the retrieved rows removed from both. With ds_i the score
    // against the mid region's mean and D = sum_K ds_i:
    //   vbar_R = vbar (1 + K/r) - (1/r) sum_K v_i
    //   S_R    = scale C^T q + vbar (1 + K/r) D - sum_K (ds_i + D/r) v_i
    const bool has_cross = tilt.lever != 0 && QueryCross(context, g, room);
    const double lever = has_cross ? tilt.lever / r : 0.0;
    const float centre = static_cast<float>(mean.of_mid);
    out.line[g] = {static_cast<float>(
                       1 / r + lever * (mean.retrieved_sum / r + (double{centre} - mean.of_mid))),
                   static_cast<float>(lever), centre};
    const double along_mean = kept * (1 + lever * mean.retrieved_sum);
    double* constant = out.constant.data() + size_t{g} * context.value_dim;
    const std::span<const double> mean_value = moment.mean_value();
    for (uint32_t l = 0; l < context.value_dim; ++l) constant[l] = along_mean * mean_value[l];
    for (uint32_t l = 0; has_cross && l < context.value_dim; ++l) {
      constant[l] += lever * room.cross[l];
    }
  }
  return out;
}

}  // namespace prefixd
