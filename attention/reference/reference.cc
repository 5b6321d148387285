#include "attention/reference/reference.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/estimators/normal.h"
#include "attention/estimators/remainder.h"
#include "attention/estimators/tilt.h"
#include "attention/rows/limits.h"

namespace prefixd::reference {
namespace {

using Vector = std::vector<double>;

Vector Decode(DType dtype, const std::byte* p, uint32_t n) {
  std::vector<float> x(n);
  ToFloat(dtype, p, x);
  return Vector(x.begin(), x.end());
}

Vector Key(const RowsView& rows, size_t i) {
  return Decode(rows.shape.dtype, rows.key(i), rows.shape.key_dim);
}

Vector Value(const RowsView& rows, size_t i) {
  return Decode(rows.shape.dtype, rows.value(i), rows.shape.value_dim);
}

double LogSumExp(const Vector& x) {
  const double max = x.empty() ? -kInf : *std::max_element(x.begin(), x.end());
  if (max == -kInf) return -kInf;
  double sum = 0;
  for (double v : x) sum += std::exp(v - max);
  return max + std::log(sum);
}

// Collects scores and values of a growing exact set, and the estimate, merged at the end.
struct Head {
  Vector scores;
  std::vector<Vector> values;

  void Add(std::span<const float> query, const LayerGeometry& layer, const RowsView& rows) {
    const Vector s = Scores(query, layer, rows);
    scores.insert(scores.end(), s.begin(), s.end());
    for (size_t i = 0; i < rows.count; ++i) values.push_back(Value(rows, i));
  }

  // Appends this head's state: y = (N_E + Z_R y_R) / (Z_E + Z_R) on one shift.
  void Finish(uint32_t value_dim, const Estimate& remainder, States& out) const {
    Vector all = scores;
    all.push_back(remainder.log_z);
    const double lse = LogSumExp(all);
    Vector y(value_dim), abs_y(value_dim);
    double max_abs = 0;
    for (size_t i = 0; i < scores.size(); ++i) {
      max_abs = std::max(max_abs, std::abs(scores[i]));
      const double p = std::exp(scores[i] - lse);
      for (uint32_t l = 0; l < value_dim; ++l) {
        y[l] += p * values[i][l];
        abs_y[l] += p * std::abs(values[i][l]);
      }
    }
    const double share = remainder.log_z == -kInf ? 0.0 : std::exp(remainder.log_z - lse);
    if (share > 0) {
      for (uint32_t l = 0; l < value_dim; ++l) {
        y[l] += share * remainder.y[l];
        abs_y[l] += share * std::abs(remainder.y[l]);
      }
    }
    out.y.insert(out.y.end(), y.begin(), y.end());
    out.abs_y.insert(out.abs_y.end(), abs_y.begin(), abs_y.end());
    out.lse.push_back(lse);
    out.rho_z.push_back(share);
    out.max_abs_score.push_back(max_abs);
  }
};

std::span<const float> Query(const GroupStepInput& in, uint32_t g) {
  const size_t dim = in.queries.size() / in.group;
  return in.queries.subspan(g * dim, dim);
}

Cut CutOf(const GroupStepInput& in, uint32_t g) { return in.cuts.empty() ? Cut{} : in.cuts[g]; }

double Remaining(const GroupStepInput& in) {
  return static_cast<double>(in.mid_count - in.retrieved.count);
}

// mean_R = (n mean_M - sum_K x) / |R|, written as a shift of the mean.
Vector RemainderMean(std::span<const double> mean, const std::vector<Vector>& removed,
                     double remaining) {
  Vector out(mean.begin(), mean.end());
  for (size_t j = 0; j < out.size(); ++j) {
    double shift = 0;
    for (const Vector& x : removed) shift += x[j] - mean[j];
    out[j] -= shift / remaining;
  }
  return out;
}

std::vector<Vector> RetrievedKeys(const GroupStepInput& in) {
  std::vector<Vector> keys;
  for (size_t i = 0; i < in.retrieved.count; ++i) keys.push_back(Key(in.retrieved, i));
  return keys;
}

double MeanRemainingScore(const GroupStepInput& in, uint32_t g) {
  const Vector mean = RemainderMean(in.moment->mean_key(), RetrievedKeys(in), Remaining(in));
  double score = 0;
  for (size_t j = 0; j < mean.size(); ++j) score += Query(in, g)[j] * mean[j];
  return in.layer.scale * score;
}

double Bracketed(double log_z, const GroupStepInput& in, uint32_t g) {
  const double mean = in.moment ? MeanRemainingScore(in, g) : -kInf;
  const Cut cut = CutOf(in, g);
  const double lower = std::log(Remaining(in)) + mean;
  const double upper = cut.kind != CutKind::kNone ? std::log(Remaining(in)) + cut.score : kInf;
  return std::max(std::min(log_z, upper), lower);
}

}  // namespace

std::vector<double> Scores(std::span<const float> query, const LayerGeometry& layer,
                           const RowsView& rows) {
  Vector scores(rows.count);
  for (size_t i = 0; i < rows.count; ++i) {
    const Vector key = Key(rows, i);
    double dot = 0;
    for (size_t j = 0; j < key.size(); ++j) dot += query[j] * key[j];
    const double s = double{layer.scale} * dot;
    scores[i] = layer.softcap > 0 ? layer.softcap * std::tanh(s / layer.softcap) : s;
  }
  return scores;
}

States ExactAttention(std::span<const float> queries, uint32_t n_queries,
                      const LayerGeometry& layer, const RowsView& rows) {
  States out;
  const uint32_t dim = rows.shape.key_dim;
  for (uint32_t g = 0; g < n_queries; ++g) {
    Head head;
    head.Add(queries.subspan(size_t{g} * dim, dim), layer, rows);
    head.Finish(rows.shape.value_dim, {-kInf, {}, 0}, out);
  }
  return out;
}

std::vector<double> LogPhi(const FeatureMap& map, std::span<const float> x) {
  const auto linear = [](const std::vector<float>& w, const std::vector<float>& b,
                         const Vector& in) {
    Vector out(b.begin(), b.end());
    for (size_t o = 0; o < out.size(); ++o) {
      for (size_t i = 0; i < in.size(); ++i) out[o] += double{w[o * in.size() + i]} * in[i];
    }
    return out;
  };
  Vector g = linear(map.w_in, map.b_in, Vector(x.begin(), x.end()));
  Vector hidden = linear(map.w1, map.b1, g);
  for (double& v : hidden) v = 0.5 * v * (1 + std::erf(v / std::sqrt(2.0)));
  const Vector h = linear(map.w2, map.b2, hidden);
  for (size_t i = 0; i < g.size(); ++i) g[i] += map.alpha * h[i];
  return linear(map.w_out, map.b_out, g);
}

Estimate EstimateMoment(const GroupStepInput& in, uint32_t g) {
  const MomentSummary& moment = *in.moment;
  const double r = Remaining(in);
  const uint32_t dk = moment.key_dim(), dv = moment.value_dim();
  const std::vector<Vector> keys = RetrievedKeys(in);
  std::vector<Vector> values;
  for (size_t i = 0; i < in.retrieved.count; ++i) values.push_back(Value(in.retrieved, i));

  // Moments of the remainder: deviations of the retrieved rows from the mid region's mean.
  Vector scaled_query(dk);
  for (uint32_t j = 0; j < dk; ++j) scaled_query[j] = double{in.layer.scale} * Query(in, g)[j];
  const Vector key_mean = RemainderMean(moment.mean_key(), keys, r);
  const Vector value_mean = RemainderMean(moment.mean_value(), values, r);
  double mu = 0, variance = 0, whole = 0;
  for (uint32_t j = 0; j < dk; ++j) {
    whole += scaled_query[j] * scaled_query[j] * moment.key_m2()[j];
    double m2 = moment.key_m2()[j];
    for (const Vector& key : keys) m2 -= std::pow(key[j] - moment.mean_key()[j], 2);
    m2 -= r * std::pow(key_mean[j] - moment.mean_key()[j], 2);
    mu += scaled_query[j] * key_mean[j];
    if (r == 1 || m2 <= kNegligibleSpread * moment.key_m2()[j]) m2 = 0;
    variance += scaled_query[j] * scaled_query[j] * m2 / r;
  }
  if (moment.has_covariance()) {
    const auto quadratic = [&](auto&& entry) {
      double sum = 0;
      for (uint32_t j = 0; j < dk; ++j) {
        for (uint32_t l = 0; l < dk; ++l) sum += scaled_query[j] * scaled_query[l] * entry(j, l);
      }
      return sum;
    };
    const auto mid = [&](uint32_t j, uint32_t l) { return moment.covariance()[j * dk + l]; };
    const auto of = [&](const Vector& x, uint32_t j) { return x[j] - moment.mean_key()[j]; };
    whole = quadratic(mid);
    const double left = quadratic([&](uint32_t j, uint32_t l) {
      double m2 = mid(j, l) - r * of(key_mean, j) * of(key_mean, l);
      for (const Vector& key : keys) m2 -= of(key, j) * of(key, l);
      return m2;
    });
    variance = r > 1 && left > kNegligibleSpread * whole ? left / r : 0;
  }
  const double sigma = std::sqrt(variance);
  const Cut cut = CutOf(in, g);
  const double c = TiltCut(cut, mu, sigma, r);

  // C of the mid region, whole or multiplied out of its factors.
  Vector cross(moment.cross().begin(), moment.cross().end());
  if (moment.cross_rank() > 0) {
    cross.assign(size_t{dk} * dv, 0.0);
    for (size_t at = 0; at < cross.size(); ++at) {
      for (uint32_t f = 0; f < moment.cross_rank(); ++f) {
        cross[at] += moment.key_factor()[at / dv * moment.cross_rank() + f] *
                     moment.value_factor()[f * dv + at % dv];
      }
    }
  }
  // Slope of the value on the score in the remainder, times its score variance.
  Vector slope(cross.empty() ? 0 : dv);
  for (uint32_t l = 0; l < slope.size(); ++l) {
    for (uint32_t j = 0; j < dk; ++j) {
      double term = cross[size_t{j} * dv + l];
      for (size_t i = 0; i < keys.size(); ++i) {
        term -= (keys[i][j] - moment.mean_key()[j]) * (values[i][l] - moment.mean_value()[l]);
      }
      term -= r * (key_mean[j] - moment.mean_key()[j]) * (value_mean[l] - moment.mean_value()[l]);
      slope[l] += scaled_query[j] * term / r;
    }
  }

  double share = r / static_cast<double>(in.mid_count);
  if (variance > 0) share = std::min(share, variance * r / whole);
  Estimate out{std::log(r) + mu, value_mean, share};
  const bool room = c > mu && (std::isinf(c) || c - mu > kNegligibleGap * (1 + std::fabs(c)));
  if (room && variance > kNegligibleVariance) {
    const double t = (c - mu - variance) / sigma;
    out.log_z = std::log(r) + mu + variance / 2 + LogNormalCdf(t);
    const double lever = 1 - NormalHazard(t) / sigma;
    for (uint32_t l = 0; l < slope.size(); ++l) out.y[l] += lever * slope[l];
  }
  out.log_z = Bracketed(out.log_z, in, g);
  return out;
}

Estimate EstimatePhi(const GroupStepInput& in, uint32_t g, PhiForm form) {
  const PhiCache& phi = *in.phi;
  const uint32_t d_phi = phi.d_phi(), dv = phi.value_dim();
  const Vector log_q = LogPhi(in.phi_q.empty() ? *in.phi_k : in.phi_q[g], Query(in, g));
  // u_K and T_K with the cache's own m [38, 39].
  Vector u_k(d_phi);
  std::vector<Vector> t_k(d_phi, Vector(dv));
  std::vector<const ApartRow*> apart;  // not retrieved
  for (const ApartRow& row : phi.apart()) apart.push_back(&row);
  for (size_t i = 0; i < in.retrieved.count; ++i) {
    const Vector key = Key(in.retrieved, i), value = Value(in.retrieved, i);
    const auto own = std::ranges::find_if(apart, [&](const ApartRow* row) {
      return std::ranges::equal(row->key, key) && std::ranges::equal(row->value, value);
    });
    if (own != apart.end()) {
      apart.erase(own);
      continue;
    }
    const Vector log_k = LogPhi(*in.phi_k, std::vector<float>(key.begin(), key.end()));
    for (uint32_t f = 0; f < d_phi; ++f) {
      if (phi.m()[f] == -kInf) continue;
      const double weight = std::exp(log_k[f] - phi.m()[f]);
      u_k[f] += weight;
      for (uint32_t l = 0; l < dv; ++l) t_k[f][l] += weight * value[l];
    }
  }

  Estimate out{-kInf, Vector(dv), 0};
  Vector log_mid;
  for (uint32_t f = 0; f < d_phi; ++f) {
    if (phi.u()[f] <= 0) continue;
    log_mid.push_back(log_q[f] + phi.m()[f] + std::log(double{phi.u()[f]}));
  }
  const double log_z_mid = LogSumExp(log_mid);
  double z_rest = 0;  // in units of Z_M
  for (uint32_t f = 0; f < d_phi; ++f) {
    if (phi.u()[f] <= 0) continue;
    const double p = std::exp(log_q[f] + phi.m()[f] - log_z_mid);
    double u_rest = phi.u()[f] - u_k[f];
    if (form == PhiForm::kPerFeature) u_rest = std::max(u_rest, kFeatureEpsilon);
    z_rest += p * u_rest;
    for (uint32_t l = 0; l < dv; ++l) {
      out.y[l] += p * (phi.t()[size_t{f} * dv + l] - t_k[f][l]);
    }
  }
  out.share = z_rest;
  Vector log_parts, scores;
  const bool left = z_rest > kNegligibleShare;
  if (left) log_parts.push_back(log_z_mid + std::log(z_rest));
  for (const ApartRow* row : apart) {
    double score = 0;
    for (size_t j = 0; j < row->key.size(); ++j) score += double{row->key[j]} * Query(in, g)[j];
    scores.push_back(in.layer.scale * score);
    log_parts.push_back(scores.back());
  }
  if (log_parts.empty()) return {-kInf, Vector(dv), z_rest};
  const double log_z = LogSumExp(log_parts);
  for (double& y : out.y) y = left ? y / z_rest * std::exp(log_parts[0] - log_z) : 0;
  for (size_t i = 0; i < apart.size(); ++i) {
    for (uint32_t l = 0; l < dv; ++l) out.y[l] += std::exp(scores[i] - log_z) * apart[i]->value[l];
  }
  out.log_z = Bracketed(log_z, in, g);
  return out;
}

States GroupStep(const GroupStepInput& in, uint32_t value_dim) {
  States out;
  for (uint32_t g = 0; g < in.group; ++g) {
    Head head;
    for (const RowsView* rows : {&in.retrieved, &in.sinks, &in.tail}) {
      head.Add(Query(in, g), in.layer, *rows);
    }
    Estimate remainder{-kInf, {}, 0};
    if (in.estimator != EstimatorKind::kNone && in.mid_count > in.retrieved.count) {
      remainder = in.estimator == EstimatorKind::kMoment ? EstimateMoment(in, g)
                                                         : EstimatePhi(in, g, in.phi_form);
    }
    head.Finish(value_dim, remainder, out);
  }
  return out;
}

}  // namespace prefixd::reference
