#include "attention/remainder.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/kernels.h"
#include "attention/normal.h"

namespace prefixd {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr size_t kFeatureRows = 256;  // retrieved rows whose features are held at once

struct Sizes {
  explicit Sizes(const GroupStepInput& in)
      : group(in.group),
        k(in.retrieved.count),
        mid(static_cast<double>(in.mid_count)),
        remaining(static_cast<double>(in.mid_count - in.retrieved.count)) {}
  uint32_t group;
  size_t k;
  double mid, remaining;
};

Cut CutOf(const GroupStepInput& in, uint32_t g) { return in.cuts.empty() ? Cut{} : in.cuts[g]; }

Remainder EmptyRemainder(const RemainderContext& context) {
  const uint32_t group = context.in.group;
  return {std::vector<double>(group, -kInf), std::vector<float>(group * context.in.retrieved.count),
          std::vector<double>(size_t{group} * context.value_dim)};
}

// Scores of the mid region under one query head, before and after the retrieved rows are removed.
struct ScoreMean {
  double of_mid = 0;         // scale q.mean_key
  double retrieved_sum = 0;  // sum over K of (s_i - of_mid)
  double of_remainder = 0;
};

ScoreMean RemoveRetrieved(const RemainderContext& context, uint32_t g) {
  const GroupStepInput& in = context.in;
  const Sizes sizes(in);
  const float* q = in.queries.data() + size_t{g} * context.key_dim;
  ScoreMean mean;
  for (uint32_t j = 0; j < context.key_dim; ++j) {
    mean.of_mid += double{q[j]} * in.moment->mean_key()[j];
  }
  mean.of_mid *= double{in.layer.scale};
  const float* s = context.scores + g * context.ld_scores;
  for (size_t i = 0; i < sizes.k; ++i) mean.retrieved_sum += double{s[i]} - mean.of_mid;
  mean.of_remainder = mean.of_mid - mean.retrieved_sum / sizes.remaining;
  return mean;
}

// Variance of each key channel over the remainder: centred sums, so that a large common mean
// cancels before anything is squared.
std::vector<double> RemainderKeyVariance(const RemainderContext& context) {
  const GroupStepInput& in = context.in;
  const Sizes sizes(in);
  const MomentSummary& moment = *in.moment;
  const uint32_t dim = context.key_dim;
  std::vector<float> centre(moment.mean_key().begin(), moment.mean_key().end());
  std::vector<double> sum(dim), sum_sq(dim), variance(dim);
  if (sizes.k > 0) {
    Kernels().centred_sums(
        {in.retrieved.data, in.retrieved.stride, sizes.k, dim, in.retrieved.shape.dtype},
        centre.data(), sum.data(), sum_sq.data());
  }
  const double k = static_cast<double>(sizes.k);
  for (uint32_t j = 0; j < dim; ++j) {
    // From the float32 centre to the mean itself.
    const double off = moment.mean_key()[j] - double{centre[j]};
    const double d = sum[j] - k * off;
    const double d2 = sum_sq[j] - 2 * off * sum[j] + k * off * off;
    const double m2 = moment.key_m2()[j] - d2 - d * d / sizes.remaining;
    // One token has no variance, whatever rounding says.
    const bool spread = sizes.remaining > 1 && m2 > kNegligibleSpread * moment.key_m2()[j];
    variance[j] = spread ? m2 / sizes.remaining : 0.0;
  }
  return variance;
}

// scale q^T C of the whole mid region: [value_dim].
std::vector<double> QueryCross(const RemainderContext& context, uint32_t g) {
  const float* q = context.in.queries.data() + size_t{g} * context.key_dim;
  const std::span<const double> cross = context.in.moment->cross();
  std::vector<double> out(context.value_dim);
  for (uint32_t j = 0; j < context.key_dim; ++j) {
    const double weight = double{context.in.layer.scale} * q[j];
    const double* row = cross.data() + size_t{j} * context.value_dim;
    for (uint32_t l = 0; l < context.value_dim; ++l) out[l] += weight * row[l];
  }
  return out;
}

}  // namespace

double TiltCut(const Cut& cut, double mean, double sigma, double remaining) {
  if (cut.kind != CutKind::kNone) return cut.score;
  return std::min(double{cut.score}, mean + sigma * std::sqrt(2 * std::log(remaining)));
}

double ClampToBracket(double log_z, const Cut& cut, double mean, double remaining) {
  const double log_count = std::log(remaining);
  if (cut.kind == CutKind::kExact) log_z = std::min(log_z, log_count + cut.score);
  return std::max(log_z, log_count + mean);
}

Remainder EstimateMoment(const RemainderContext& context) {
  const GroupStepInput& in = context.in;
  const Sizes sizes(in);
  const MomentSummary& moment = *in.moment;
  const double r = sizes.remaining;
  Remainder out = EmptyRemainder(context);
  const std::vector<double> key_variance = RemainderKeyVariance(context);

  for (uint32_t g = 0; g < sizes.group; ++g) {
    const float* q = in.queries.data() + size_t{g} * context.key_dim;
    const ScoreMean mean = RemoveRetrieved(context, g);
    double variance = 0;
    for (uint32_t j = 0; j < context.key_dim; ++j) {
      const double weight = double{in.layer.scale} * q[j];
      variance += weight * weight * key_variance[j];
    }
    const double sigma = std::sqrt(variance);
    const Cut cut = CutOf(in, g);
    const double c = TiltCut(cut, mean.of_remainder, sigma, r);

    double log_mean = mean.of_remainder;
    double tau = 0;  // how far the weights exp(s) below the cut move the mean value
    if (variance > kNegligibleVariance && c > mean.of_remainder) {
      log_mean = LogTiltedMass(mean.of_remainder, sigma, c);
      if (moment.has_cross()) {
        const double t = (c - mean.of_remainder) / sigma - sigma;
        tau = 1 - NormalHazard(t) / sigma;
      }
    }
    out.log_z[g] = ClampToBracket(std::log(r) + log_mean, cut, mean.of_remainder, r);

    // y_R = vbar_R + tau/r * S_R with the retrieved rows removed from both. With ds_i the score
    // against the mid region's mean and D = sum_K ds_i:
    //   vbar_R = vbar (1 + K/r) - (1/r) sum_K v_i
    //   S_R    = scale C^T q + vbar (1 + K/r) D - sum_K (ds_i + D/r) v_i
    const double lever = tau / r;
    const float* s = context.scores + g * context.ld_scores;
    float* coefficient = out.coefficient.data() + g * sizes.k;
    for (size_t i = 0; i < sizes.k; ++i) {
      const double ds = double{s[i]} - mean.of_mid + mean.retrieved_sum / r;
      coefficient[i] = static_cast<float>(1 / r + lever * ds);
    }
    const double along_mean =
        (1 + static_cast<double>(sizes.k) / r) * (1 + lever * mean.retrieved_sum);
    double* constant = out.constant.data() + size_t{g} * context.value_dim;
    for (uint32_t l = 0; l < context.value_dim; ++l) {
      constant[l] = along_mean * moment.mean_value()[l];
    }
    if (tau != 0) {
      const std::vector<double> cross = QueryCross(context, g);
      for (uint32_t l = 0; l < context.value_dim; ++l) constant[l] += lever * cross[l];
    }
  }
  return out;
}

namespace {

// One query head against the phi cache of M: p[f] = phi_q[f] e^{m[f]} / Z_M, so that
// sum_f p[f] u[f] = 1.
struct PhiHead {
  double log_z_mid = -kInf;
  std::vector<double> p;  // [d_phi]
};

PhiHead EvaluateCache(const FeatureMap& phi_q, const PhiCache& phi, std::span<const float> query) {
  const uint32_t d_phi = phi.d_phi();
  std::vector<float> log_q(d_phi);
  phi_q.LogPhi(query, 1, log_q);
  PhiHead head;
  head.p.resize(d_phi);
  double max = -kInf;
  for (uint32_t f = 0; f < d_phi; ++f) {
    if (phi.u()[f] > 0) {
      max = std::max(max, double{log_q[f]} + phi.m()[f] + std::log(double{phi.u()[f]}));
    }
  }
  if (max == -kInf) return head;
  double sum = 0;
  for (uint32_t f = 0; f < d_phi; ++f) {
    if (phi.u()[f] <= 0) continue;
    head.p[f] = std::exp(double{log_q[f]} + phi.m()[f] - max);
    sum += head.p[f] * phi.u()[f];
  }
  for (double& p : head.p) p /= sum;
  head.log_z_mid = max + std::log(sum);
  return head;
}

// z[g][i] = sum_f p_g[f] exp(log phi_k(k_i)[f] - m[f]): each retrieved row's share of Z_M.
void RetrievedShares(const RemainderContext& context, const std::vector<PhiHead>& heads, float* z) {
  const GroupStepInput& in = context.in;
  const RowsView& rows = in.retrieved;
  const uint32_t d_phi = in.phi->d_phi();
  const size_t ldp = PadUp(d_phi);
  std::vector<float> p(heads.size() * ldp);
  for (size_t g = 0; g < heads.size(); ++g) {
    std::ranges::transform(heads[g].p, p.begin() + g * ldp,
                           [](double x) { return static_cast<float>(x); });
  }
  std::vector<float> keys, features;
  for (size_t begin = 0; begin < rows.count; begin += kFeatureRows) {
    const size_t n = std::min(kFeatureRows, rows.count - begin);
    keys.resize(n * context.key_dim);
    features.resize(n * d_phi);
    for (size_t i = 0; i < n; ++i) {
      ToFloat(rows.shape.dtype, rows.key(begin + i),
              std::span(keys).subspan(i * context.key_dim, context.key_dim));
    }
    in.phi_k->LogPhi(keys, n, features);
    for (size_t i = 0; i < n; ++i) {
      for (uint32_t f = 0; f < d_phi; ++f) {
        const float m = in.phi->m()[f];
        float& feature = features[i * d_phi + f];
        feature = std::isfinite(m) ? feature - m : -1e30f;  // a feature no token has
      }
    }
    Kernels().exp_shifted(features.data(), features.size(), 0.0f, features.data());
    const VectorBlock block = {reinterpret_cast<const std::byte*>(features.data()),
                               d_phi * sizeof(float), n, d_phi, DType::kF32};
    Kernels().dot(p.data(), ldp, heads.size(), block, 1.0f, z + begin, rows.count);
  }
}

}  // namespace

Remainder EstimatePhi(const RemainderContext& context) {
  const GroupStepInput& in = context.in;
  const Sizes sizes(in);
  const PhiCache& phi = *in.phi;
  Remainder out = EmptyRemainder(context);
  std::vector<PhiHead> heads(sizes.group);
  for (uint32_t g = 0; g < sizes.group; ++g) {
    heads[g] = EvaluateCache(in.phi_q[g], phi,
                             in.queries.subspan(size_t{g} * context.key_dim, context.key_dim));
  }
  RetrievedShares(context, heads, out.coefficient.data());

  for (uint32_t g = 0; g < sizes.group; ++g) {
    float* coefficient = out.coefficient.data() + g * sizes.k;
    double share = 1;  // Z_R / Z_M
    for (size_t i = 0; i < sizes.k; ++i) share -= double{coefficient[i]};
    // Also taken when the maps overflowed into NaN: no mass rather than a wrong one.
    if (!(share > kNegligibleShare) || !std::isfinite(heads[g].log_z_mid)) {
      std::fill_n(coefficient, sizes.k, 0.0f);
      continue;
    }
    const double mean = in.moment ? RemoveRetrieved(context, g).of_remainder : -kInf;
    out.log_z[g] =
        ClampToBracket(heads[g].log_z_mid + std::log(share), CutOf(in, g), mean, sizes.remaining);
    if (out.log_z[g] == -kInf) {  // an exact cut of -inf: nothing is left
      std::fill_n(coefficient, sizes.k, 0.0f);
      continue;
    }
    for (size_t i = 0; i < sizes.k; ++i) {
      coefficient[i] = static_cast<float>(coefficient[i] / share);
    }
    double* constant = out.constant.data() + size_t{g} * context.value_dim;
    for (uint32_t f = 0; f < phi.d_phi(); ++f) {
      const double weight = heads[g].p[f] / share;
      if (weight == 0) continue;
      const float* t = phi.t().data() + size_t{f} * context.value_dim;
      for (uint32_t l = 0; l < context.value_dim; ++l) constant[l] += weight * t[l];
    }
  }
  return out;
}

}  // namespace prefixd
