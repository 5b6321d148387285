// Estimates the remainder by the max-shifted phi cache (docs/mathematics.md).
#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/estimators/remainder.h"
#include "attention/kernels/kernels.h"
#include "attention/rows/sum_of.h"

namespace prefixd {
namespace {

constexpr double kInfLogMass = std::numeric_limits<double>::infinity();
constexpr float kEmptyLogMass = -std::numeric_limits<float>::infinity();
constexpr double kLargeWeight = 1e30;
constexpr size_t kPhiRows = 256;  // retrieved rows whose features are held at once

// Relates one query head to the phi cache of M: p[f] = phi_q[f] e^{m[f]} / Z_M, so that
// sum_f p[f] u[f] = 1.
struct PhiHead {
  double log_z_mid = -kInfLogMass;
  std::vector<double> p;  // [d_phi]
};

PhiHead EvaluateCache(const FeatureMap& phi_q, const PhiCache& phi, std::span<const float> query) {
  const uint32_t d_phi = phi.d_phi();
  std::vector<float> log_q(d_phi);
  phi_q.LogPhi(query, 1, log_q);
  PhiHead head;
  head.p.resize(d_phi);
  double max = -kInfLogMass;
  for (uint32_t f = 0; f < d_phi; ++f) {
    if (phi.u()[f] > 0) {
      max = std::max(max, double{log_q[f]} + phi.m()[f] + std::log(double{phi.u()[f]}));
    }
  }
  if (max == -kInfLogMass) return head;
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

// Tells which of the rows that the cache keeps apart were retrieved.
struct Apart {
  std::vector<const ApartRow*> left;  // not retrieved
  std::vector<bool> retrieved;        // [K], whether the row is one of them; empty: none is

  explicit Apart(const GroupStepInput& in) {
    std::vector<float> key, value;
    for (const ApartRow& row : in.phi->apart()) {
      key.resize(row.key.size());
      value.resize(row.value.size());
      retrieved.resize(in.retrieved.count);
      bool found = false;
      // Rows of equal bytes stand for one another, each for one.
      for (size_t i = 0; i < in.retrieved.count && !found; ++i) {
        if (retrieved[i]) continue;
        const RowsView& rows = in.retrieved;
        ToFloat(rows.shape.dtype, rows.key(i), key);
        if (key != row.key) continue;
        ToFloat(rows.shape.dtype, rows.value(i), value);
        found = retrieved[i] = value == row.value;
      }
      if (!found) left.push_back(&row);
    }
  }
  bool is(size_t i) const { return !retrieved.empty() && retrieved[i]; }
};

// Computes the retrieved rows' weights exp(log phi_k(k_i)[f] - base[f]), [n][d_phi], from the
// stored features or with phi_k; 0 for rows that are not in the sums.
class RetrievedWeights {
 public:
  RetrievedWeights(const RemainderContext& context, const Apart& apart)
      : in_(context.in),
        apart_(apart),
        key_dim_(context.key_dim),
        d_phi_(context.in.phi->d_phi()) {}

  // Returns how many rows from `begin` on share one base.
  size_t Run(size_t begin) const {
    const size_t most = std::min(kPhiRows, in_.retrieved.count - begin);
    if (in_.features.data == nullptr || in_.features.chunks.empty()) return most;
    size_t n = 1;
    while (n < most && Chunk(begin + n) == Chunk(begin)) ++n;
    return n;
  }

  // Returns the base of rows [begin, begin + Run(begin)): [d_phi].
  std::span<const float> Base(size_t begin) const {
    if (in_.features.data == nullptr) return in_.phi->m();
    return in_.features.m.subspan(size_t{Chunk(begin)} * d_phi_, d_phi_);
  }

  void Fill(size_t begin, size_t n, std::vector<float>& weights) {
    weights.resize(n * d_phi_);
    Compute(begin, n, weights);
    for (size_t i = 0; i < n; ++i) {
      if (apart_.is(begin + i)) std::fill_n(weights.begin() + ptrdiff_t(i * d_phi_), d_phi_, 0.0f);
    }
  }

 private:
  void Compute(size_t begin, size_t n, std::span<float> weights) {
    if (in_.features.data != nullptr) {
      for (size_t i = 0; i < n; ++i) {
        DecodeFeatures(in_.features.format, in_.features.data + (begin + i) * in_.features.stride,
                       weights.subspan(i * d_phi_, d_phi_));
      }
      return;
    }
    const RowsView& rows = in_.retrieved;
    keys_.resize(n * key_dim_);
    for (size_t i = 0; i < n; ++i) {
      Kernels().to_float(rows.shape.dtype, rows.key(begin + i), key_dim_,
                         keys_.data() + i * key_dim_);
    }
    in_.phi_k->LogPhi(keys_, n, weights);
    const std::span<const float> m = in_.phi->m();
    for (size_t i = 0; i < n; ++i) {
      for (uint32_t f = 0; f < d_phi_; ++f) {
        float& feature = weights[i * d_phi_ + f];
        feature = m[f] == kEmptyLogMass ? -1e30f : feature - m[f];  // a feature no token has
      }
    }
    Kernels().exp_shifted(weights.data(), weights.size(), 0.0f, weights.data());
  }

  uint32_t Chunk(size_t i) const {
    return in_.features.chunks.empty() ? 0 : in_.features.chunks[i];
  }

  const GroupStepInput& in_;
  const Apart& apart_;
  const uint32_t key_dim_, d_phi_;
  std::vector<float> keys_;
};

// z[g][i] = sum_f p_g[f] exp(log phi_k(k_i)[f] - m[f]): each retrieved row's share of Z_M.
// u_k (if not null): the rows' sum of each feature, relative to m.
void RetrievedShares(const RemainderContext& context, const Apart& apart,
                     const std::vector<PhiHead>& heads, float* z, std::vector<double>* u_k) {
  const GroupStepInput& in = context.in;
  const size_t k = context.k();
  const uint32_t d_phi = in.phi->d_phi();
  const size_t ldp = PadUp(d_phi);
  std::vector<float> p(heads.size() * ldp), weights;
  std::vector<double> to_m(d_phi), sum(d_phi);
  const std::vector<float> ones(kPhiRows, 1.0f);
  RetrievedWeights source(context, apart);
  for (size_t begin = 0; begin < k;) {
    const size_t n = source.Run(begin);
    const std::span<const float> base = source.Base(begin);
    for (uint32_t f = 0; f < d_phi; ++f) {
      // A chunk without the feature has no weight in it, whatever its base.
      const bool none = base[f] == kEmptyLogMass || in.phi->m()[f] == kEmptyLogMass;
      // A base may be that of a row kept apart, whose weights are 0: infinity would make them NaN.
      to_m[f] = none ? 0.0 : std::min(kLargeWeight, std::exp(double{base[f]} - in.phi->m()[f]));
      for (size_t g = 0; g < heads.size(); ++g) {
        p[g * ldp + f] = static_cast<float>(std::min(kLargeWeight, heads[g].p[f] * to_m[f]));
      }
    }
    source.Fill(begin, n, weights);
    const VectorBlock block = {reinterpret_cast<const std::byte*>(weights.data()),
                               d_phi * sizeof(float), n, d_phi, DType::kF32};
    Kernels().dot(p.data(), ldp, heads.size(), block, 1.0f, z + begin, k);
    if (u_k != nullptr) {
      std::ranges::fill(sum, 0.0);
      Kernels().weighted_sum(ones.data(), n, 1, block, sum.data(), d_phi);
      for (uint32_t f = 0; f < d_phi; ++f) (*u_k)[f] += to_m[f] * sum[f];
    }
    begin += n;
  }
}

// Returns Z_R / Z_M of one head.
double RemainingShare(PhiForm form, const PhiCache& phi, const PhiHead& head,
                      std::span<const float> retrieved, const std::vector<double>& u_k) {
  if (form == PhiForm::kSigned) {
    double share = 1;
    for (float z : retrieved) share -= double{z};
    return share;
  }
  double share = 0;
  for (uint32_t f = 0; f < phi.d_phi(); ++f) {
    if (phi.u()[f] > 0) share += head.p[f] * std::max(phi.u()[f] - u_k[f], kFeatureEpsilon);
  }
  return share;
}

}  // namespace

namespace {

// The rows kept apart that were not retrieved, under one query head: their mass, and the scores
// that it is made of.
struct ApartMass {
  double log_z = -kInfLogMass;
  std::vector<double> scores;  // of apart.left
};

ApartMass MassOf(const Apart& apart, const RemainderContext& context, uint32_t g) {
  ApartMass mass;
  double max = -kInfLogMass, sum = 0;
  const std::span<const float> q = context.query(g);
  for (const ApartRow* row : apart.left) {
    mass.scores.push_back(double{context.in.layer.scale} * SumOf(context.key_dim, [&](size_t j) {
                            return double{q[j]} * row->key[j];
                          }));
    max = std::max(max, mass.scores.back());
  }
  for (const double score : mass.scores) sum += std::exp(score - max);
  if (sum > 0) mass.log_z = max + std::log(sum);
  return mass;
}

double LogSum(double a, double b) {
  const double max = std::max(a, b);
  return max == -kInfLogMass ? max : max + std::log1p(std::exp(std::min(a, b) - max));
}

}  // namespace

Remainder EstimatePhi(const RemainderContext& context) {
  const GroupStepInput& in = context.in;
  const PhiCache& phi = *in.phi;
  Remainder out = EmptyCoefficients(context);
  std::vector<PhiHead> heads(context.group());
  for (uint32_t g = 0; g < context.group(); ++g) {
    const FeatureMap& phi_q = in.phi_q.empty() ? *in.phi_k : in.phi_q[g];
    heads[g] = EvaluateCache(phi_q, phi, context.query(g));
  }
  const Apart apart(in);
  std::vector<double> u_k(phi.d_phi());
  RetrievedShares(context, apart, heads, out.coefficient.data(),
                  in.phi_form == PhiForm::kPerFeature ? &u_k : nullptr);

  for (uint32_t g = 0; g < context.group(); ++g) {
    float* coefficient = out.coefficient.data() + g * context.k();
    const double share =
        RemainingShare(in.phi_form, phi, heads[g], {coefficient, context.k()}, u_k);
    // Maps that overflowed into NaN end here too: no mass rather than a wrong one.
    const bool left = share > kNegligibleShare && std::isfinite(heads[g].log_z_mid);
    const double log_z_sums = left ? heads[g].log_z_mid + std::log(share) : -kInfLogMass;
    const ApartMass mass = MassOf(apart, context, g);
    const double log_z = LogSum(log_z_sums, mass.log_z);
    if (log_z != -kInfLogMass) {
      out.log_z[g] = ClampToBracket(log_z, context.cut(g), MeanRemainingScore(context, g),
                                    context.remaining());
    }
    if (out.log_z[g] == -kInfLogMass) {  // nothing is left, or an exact cut of -inf leaves nothing
      std::fill_n(coefficient, context.k(), 0.0f);
      continue;
    }
    const double of_sums = left ? std::exp(log_z_sums - log_z) / share : 0;
    for (size_t i = 0; i < context.k(); ++i) {
      coefficient[i] = left ? static_cast<float>(coefficient[i] * of_sums) : 0.0f;
    }
    double* constant = out.constant.data() + size_t{g} * context.value_dim;
    for (uint32_t f = 0; f < phi.d_phi() && left; ++f) {
      const double weight = heads[g].p[f] * of_sums;
      if (weight == 0) continue;
      const float* t = phi.t().data() + size_t{f} * context.value_dim;
      for (uint32_t l = 0; l < context.value_dim; ++l) constant[l] += weight * t[l];
    }
    for (size_t i = 0; i < apart.left.size(); ++i) {
      const double weight = std::exp(mass.scores[i] - log_z);
      const std::vector<float>& value = apart.left[i]->value;
      for (uint32_t l = 0; l < context.value_dim; ++l) constant[l] += weight * value[l];
    }
  }
  return out;
}

}  // namespace prefixd
