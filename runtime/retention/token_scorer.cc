#include "runtime/retention/token_scorer.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>

namespace prefixd {
namespace {

double Silu(double x) { return x / (1 + std::exp(-x)); }
double LogSigmoid(double x) { return std::min(x, 0.0) - std::log1p(std::exp(-std::abs(x))); }

// out = b + x w, for w [x.size(), out.size()]; b may be empty.
void Linear(std::span<const double> x, std::span<const float> w, std::span<const float> b,
            std::span<double> out) {
  if (b.empty()) {
    std::ranges::fill(out, 0.0);
  } else {
    std::ranges::copy(b, out.begin());
  }
  for (size_t i = 0; i < x.size(); ++i) {
    const float* row = w.data() + i * out.size();
    for (size_t j = 0; j < out.size(); ++j) out[j] += x[i] * row[j];
  }
}

double Dot(std::span<const double> x, std::span<const float> w) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * w[i];
  return sum;
}

// out: twice as long as x.
void Softmaxes(std::span<const double> x, std::span<double> out) {
  const auto [low, high] = std::ranges::minmax(x);
  double up = 0, down = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    up += out[i] = std::exp(x[i] - high);
    down += out[x.size() + i] = std::exp(low - x[i]);
  }
  for (size_t i = 0; i < x.size(); ++i) {
    out[i] /= up;
    out[x.size() + i] /= down;
  }
}

// Reads the normalised keys and values of tokens.
class Inputs {
 public:
  Inputs(const TokenScorer& scorer, const RowsView& rows)
      : scorer_(scorer), rows_(rows), raw_(scorer.mean.size()), x_(raw_.size()) {}

  std::span<const double> of(size_t token) {
    const RowShape& shape = rows_.shape;
    const auto raw = std::span(raw_);
    ToFloat(shape.dtype, rows_.key(token), raw.first(shape.key_dim));
    ToFloat(shape.dtype, rows_.value(token), raw.subspan(shape.key_dim));
    for (size_t i = 0; i < x_.size(); ++i) {
      x_[i] = (double{raw_[i]} - scorer_.mean[i]) / scorer_.scale[i];
    }
    return x_;
  }

 private:
  const TokenScorer& scorer_;
  const RowsView& rows_;
  std::vector<float> raw_;
  std::vector<double> x_;
};

double MlpScore(const MlpWeights& w, std::span<const double> x, std::vector<double>& hidden) {
  hidden.resize(w.b1.size());
  Linear(x, w.w1, w.b1, hidden);
  double score = w.b2;
  for (size_t j = 0; j < hidden.size(); ++j) score += w.w2[j] * Silu(hidden[j]);
  return score;
}

// C <- f C + i k (x) v and z <- f z + i k, both over exp(m), so that no gate overflows.
class Memory {
 public:
  explicit Memory(const MlstmWeights& weights)
      : w_(weights),
        half_(weights.a.size()),
        k_(2 * half_),
        v_(half_),
        part_(half_),
        z_(2 * half_),
        c_(2 * half_ * half_) {}

  void Read(std::span<const double> x) {
    Linear(x, w_.wk, {}, part_);
    Softmaxes(part_, k_);
    Linear(x, w_.wv, {}, v_);
    const double log_i = Dot(x, w_.wi) + w_.bi;
    const double log_f = LogSigmoid(Dot(x, w_.wf) + w_.bf);
    const double m = std::max(m_ + log_f, log_i);
    const double keep = std::exp(m_ + log_f - m), add = std::exp(log_i - m);
    m_ = m;
    for (size_t i = 0; i < k_.size(); ++i) {
      z_[i] = keep * z_[i] + add * k_[i];
      double* row = c_.data() + i * half_;
      for (size_t j = 0; j < half_; ++j) row[j] = keep * row[j] + add * k_[i] * v_[j];
    }
  }

  double Score(std::span<const double> x) {
    Linear(x, w_.wq, {}, part_);
    std::vector<double> q(2 * half_), h(half_);
    Softmaxes(part_, q);
    double below = 0;
    for (size_t i = 0; i < q.size(); ++i) {
      below += q[i] * z_[i];
      const double* row = c_.data() + i * half_;
      for (size_t j = 0; j < half_; ++j) h[j] += q[i] * row[j];
    }
    double score = w_.b;
    for (size_t j = 0; j < half_; ++j) score += w_.a[j] * Silu(h[j] / std::max(below, 1e-30));
    return score;
  }

 private:
  const MlstmWeights& w_;
  const size_t half_;
  std::vector<double> k_, v_, part_, z_, c_;
  double m_ = -std::numeric_limits<double>::infinity();
};

Status CheckPart(const char* name, std::span<const float> values, size_t size) {
  if (values.size() != size) {
    return InvalidArgument(std::string(name) + " has " + std::to_string(values.size()) +
                           " elements instead of " + std::to_string(size));
  }
  if (!std::ranges::all_of(values, [](float x) { return std::isfinite(x); })) {
    return InvalidArgument(std::string(name) + " holds NaN or infinity");
  }
  return {};
}

}  // namespace

Status TokenScorer::Validate() const {
  const size_t width = mean.size();
  PREFIXD_TRY(CheckPart("mean", mean, width));
  PREFIXD_TRY(CheckPart("scale", scale, width));
  if (!std::ranges::all_of(scale, [](float x) { return x > 0; })) {
    return InvalidArgument("scale is not above 0 everywhere");
  }
  if (!(log_decay <= 0) || !std::isfinite(log_decay)) {
    return InvalidArgument("log_decay is above 0 or not finite");
  }
  if (const auto* mlp = std::get_if<MlpWeights>(&weights)) {
    PREFIXD_TRY(CheckPart("b1", mlp->b1, mlp->b1.size()));
    PREFIXD_TRY(CheckPart("w1", mlp->w1, width * mlp->b1.size()));
    PREFIXD_TRY(CheckPart("w2", mlp->w2, mlp->b1.size()));
    return CheckPart("b2", {&mlp->b2, 1}, 1);
  }
  const auto& memory = std::get<MlstmWeights>(weights);
  const size_t half = memory.a.size();
  if (half == 0) return InvalidArgument("a has no elements");
  PREFIXD_TRY(CheckPart("a", memory.a, half));
  for (const auto* w : {&memory.wq, &memory.wk, &memory.wv}) {
    PREFIXD_TRY(CheckPart("wq, wk or wv", *w, width * half));
  }
  PREFIXD_TRY(CheckPart("wi", memory.wi, width));
  PREFIXD_TRY(CheckPart("wf", memory.wf, width));
  for (const float* b : {&memory.bi, &memory.bf, &memory.b}) {
    PREFIXD_TRY(CheckPart("bi, bf or b", {b, 1}, 1));
  }
  return {};
}

std::vector<double> TokenPriorities(const TokenScorer& scorer, const RowsView& rows,
                                    TokenRange region) {
  std::vector<double> out(region.size(), std::numeric_limits<double>::infinity());
  const size_t scored = rows.count - std::min<size_t>(rows.count, scorer.window);
  const size_t end = std::min<size_t>(region.end, scored);
  if (end <= region.begin) return out;
  const auto set = [&](size_t token, double score) {
    out[token - region.begin] = score - static_cast<double>(token) * scorer.log_decay;
  };
  Inputs inputs(scorer, rows);
  if (const auto* mlp = std::get_if<MlpWeights>(&scorer.weights)) {
    std::vector<double> hidden;
    for (size_t t = region.begin; t < end; ++t) set(t, MlpScore(*mlp, inputs.of(t), hidden));
    return out;
  }
  Memory memory(std::get<MlstmWeights>(scorer.weights));
  for (size_t t = 0; t < end + scorer.window; ++t) {
    memory.Read(inputs.of(t));
    if (t < region.begin + size_t{scorer.window}) continue;
    const size_t leaves = t - scorer.window;
    set(leaves, memory.Score(inputs.of(leaves)));
  }
  return out;
}

}  // namespace prefixd
