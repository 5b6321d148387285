#include "index/code_training.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <queue>
#include <string>

#include "attention/step.h"
#include "index/symmetric_eigen.h"

namespace prefixd::index {
namespace {

constexpr size_t kTrainKeys = 8192, kFitKeys = 4096;
constexpr size_t kEncodeRows = 256;
// How much the sampled queries' second moment is rounded. Later queries go elsewhere too: taken at
// their word, samples lower the recall of a real decode below that of no samples (selection_bench).
constexpr double kRound = 0.6;

// Error that a uniform quantiser of `digits` base-4 digits leaves of a Gaussian of variance 1
// (Max 1960); what allocation goes by.
constexpr double kLeft[kMaxCodeDigits + 1] = {1, 0.1188, 0.01154, 0.001041, 0.0000896};

// Rows as float64, with the first one that is not finite named.
Result<std::vector<double>> SampleRows(const RowsView& keys, size_t most) {
  const uint32_t dim = keys.shape.key_dim;
  const size_t stride = std::max<size_t>(1, (keys.count + most - 1) / most);
  std::vector<double> out;
  std::vector<float> row(dim);
  for (size_t i = 0; i < keys.count; i += stride) {
    ToFloat(keys.shape.dtype, keys.key(i), row);
    for (const float x : row) {
      if (!std::isfinite(x)) {
        return InvalidArgument("the key of row " + std::to_string(i) + " is NaN or infinite");
      }
    }
    out.insert(out.end(), row.begin(), row.end());
  }
  return out;
}

// sum over rows of row^T row / rows: [dim][dim]
std::vector<double> SecondMoment(std::span<const double> rows, uint32_t dim) {
  std::vector<double> m(size_t{dim} * dim);
  const size_t n = rows.size() / dim;
  for (size_t r = 0; r < n; ++r) {
    const double* row = rows.data() + r * dim;
    for (uint32_t a = 0; a < dim; ++a) {
      double* out = m.data() + size_t{a} * dim;
      for (uint32_t b = 0; b <= a; ++b) out[b] += row[a] * row[b];
    }
  }
  for (uint32_t a = 0; a < dim; ++a) {
    for (uint32_t b = 0; b <= a; ++b) {
      m[size_t{a} * dim + b] /= double(n);
      m[size_t{b} * dim + a] = m[size_t{a} * dim + b];
    }
  }
  return m;
}

std::vector<double> Multiply(std::span<const double> a, std::span<const double> b, uint32_t dim) {
  std::vector<double> out(size_t{dim} * dim);
  for (uint32_t i = 0; i < dim; ++i) {
    for (uint32_t j = 0; j < dim; ++j) {
      const double x = a[size_t{i} * dim + j];
      for (uint32_t l = 0; l < dim; ++l) out[size_t{i} * dim + l] += x * b[size_t{j} * dim + l];
    }
  }
  return out;
}

// Sq^1/2 and its inverse.
struct Metric {
  std::vector<double> root, inverse;  // [dim][dim], symmetric
};

Result<Metric> QueryMetric(std::span<const float> queries, uint32_t dim) {
  Metric metric{std::vector<double>(size_t{dim} * dim), std::vector<double>(size_t{dim} * dim)};
  const size_t n = queries.size() / dim;
  std::vector<double> rows(queries.begin(), queries.end());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (!std::isfinite(rows[i])) {
      return InvalidArgument("sampled query " + std::to_string(i / dim) + " is NaN or infinite");
    }
  }
  std::vector<double> moment = n > 0 ? SecondMoment(rows, dim) : std::vector<double>();
  double mean = 0;
  for (uint32_t d = 0; d < dim && n > 0; ++d) mean += moment[size_t{d} * dim + d] / dim;
  if (!(mean > 0)) {  // no queries, or all zero
    for (uint32_t d = 0; d < dim; ++d) {
      metric.root[size_t{d} * dim + d] = metric.inverse[size_t{d} * dim + d] = 1;
    }
    return metric;
  }
  for (uint32_t a = 0; a < dim; ++a) {
    for (uint32_t b = 0; b < dim; ++b) {
      double& x = moment[size_t{a} * dim + b];
      x = ((1 - kRound) * x + (a == b ? kRound * mean : 0)) / mean;
    }
  }
  PREFIXD_ASSIGN(const Eigen eigen, SymmetricEigen(std::move(moment), dim));
  for (uint32_t i = 0; i < dim; ++i) {
    const double root = std::sqrt(std::max(eigen.values[i], kRound / 2));
    const double* v = eigen.vectors.data() + size_t{i} * dim;
    for (uint32_t a = 0; a < dim; ++a) {
      for (uint32_t b = 0; b < dim; ++b) {
        metric.root[size_t{a} * dim + b] += root * v[a] * v[b];
        metric.inverse[size_t{a} * dim + b] += v[a] * v[b] / root;
      }
    }
  }
  return metric;
}

// Digits of each axis, most error first.
std::vector<uint8_t> AllocateDigits(std::span<const double> variances, uint32_t fields) {
  std::vector<uint8_t> digits(variances.size(), 0);
  using Gain = std::pair<double, size_t>;
  std::priority_queue<Gain> gains;
  const auto offer = [&](size_t i) {
    if (digits[i] == kMaxCodeDigits || !(variances[i] > 0)) return;
    gains.emplace(variances[i] * (kLeft[digits[i]] - kLeft[digits[i] + 1]), i);
  };
  for (size_t i = 0; i < variances.size(); ++i) offer(i);
  for (uint32_t used = 0; used < fields && !gains.empty(); ++used) {
    const size_t i = gains.top().second;
    gains.pop();
    ++digits[i];
    offer(i);
  }
  return digits;
}

// x ~ low + step * C, C = 0 .. levels - 1
struct Steps {
  double low = 0, step = 0, error = std::numeric_limits<double>::infinity();
};

double CodeOf(double x, double low, double step, double top) {
  return std::clamp(std::nearbyint((x - low) / step), 0.0, top);
}

// Least squares in turns with assignment, from several widths.
Steps FitSteps(std::span<const double> x, uint32_t levels) {
  const double n = double(x.size()), top = levels - 1;
  double mean = 0, square = 0;
  const auto [least, most] = std::minmax_element(x.begin(), x.end());
  for (const double v : x) mean += v / n;
  for (const double v : x) square += (v - mean) * (v - mean) / n;
  const double sigma = std::sqrt(square);
  if (!(sigma > 0) || !(*most > *least)) return {mean, 0, 0};
  Steps best;
  for (const double width : {1.5, 2.2, 3.0, 4.5, 0.0}) {  // 0: all of the range
    Steps now{mean - width * sigma, 2 * width * sigma / top, 0};
    if (width == 0) now = {*least, (*most - *least) / top, 0};
    for (int round = 0; round < 6 && now.step > 0; ++round) {
      double c1 = 0, c2 = 0, xc = 0;
      now.error = 0;
      for (const double v : x) {
        const double c = CodeOf(v, now.low, now.step, top);
        const double miss = v - now.low - now.step * c;
        now.error += miss * miss;
        c1 += c;
        c2 += c * c;
        xc += c * v;
      }
      if (now.error < best.error) best = now;
      const double spread = c2 - c1 * c1 / n;
      if (!(spread > 0)) break;
      now.step = (xc - c1 * mean) / spread;
      now.low = mean - now.step * c1 / n;
    }
  }
  return best;
}

}  // namespace

Result<KeyEncoder> KeyEncoder::Train(const RowsView& keys, std::span<const float> queries) {
  const uint32_t dim = keys.shape.key_dim;
  if (keys.count == 0 || dim == 0 || queries.size() % dim != 0) {
    return InvalidArgument("codes need keys, and queries of their dimensions");
  }
  PREFIXD_ASSIGN(std::vector<double> sample, SampleRows(keys, kTrainKeys));
  const size_t n = sample.size() / dim;
  std::vector<double> mean(dim, 0.0);
  for (size_t i = 0; i < sample.size(); ++i) mean[i % dim] += sample[i] / double(n);
  for (size_t i = 0; i < sample.size(); ++i) sample[i] -= mean[i % dim];

  PREFIXD_ASSIGN(const Metric metric, QueryMetric(queries, dim));
  const std::vector<double> covariance = SecondMoment(sample, dim);
  PREFIXD_ASSIGN(
      const Eigen axes,
      SymmetricEigen(Multiply(Multiply(metric.root, covariance, dim), metric.root, dim), dim));
  const std::vector<uint8_t> digits = AllocateDigits(axes.values, CodeFields(dim));

  KeyEncoder out;
  out.book_.key_dim = dim;
  std::vector<double> centre = mean;
  std::vector<double> coordinates;
  const size_t stride = (n + kFitKeys - 1) / kFitKeys;
  for (uint32_t i = 0; i < dim; ++i) {
    if (digits[i] == 0) continue;
    // Coordinate: v.A (k - mean); back: A^-1 v times it.
    const double* v = axes.vectors.data() + size_t{i} * dim;
    std::vector<double> axis(dim, 0.0), direction(dim, 0.0);
    for (uint32_t a = 0; a < dim; ++a) {
      for (uint32_t b = 0; b < dim; ++b) {
        axis[b] += v[a] * metric.root[size_t{a} * dim + b];
        direction[b] += v[a] * metric.inverse[size_t{a} * dim + b];
      }
    }
    coordinates.clear();
    for (size_t r = 0; r < n; r += stride) {
      double x = 0;
      for (uint32_t d = 0; d < dim; ++d) x += axis[d] * sample[r * dim + d];
      coordinates.push_back(x);
    }
    const Steps steps = FitSteps(coordinates, 1u << 2 * digits[i]);
    if (!(steps.step > 0)) continue;
    out.book_.digits.push_back(digits[i]);
    double offset = steps.low;
    for (uint32_t d = 0; d < dim; ++d) {
      offset += axis[d] * mean[d];
      centre[d] += steps.low * direction[d];
      out.axes_.push_back(static_cast<float>(axis[d]));
      out.book_.directions.push_back(FloatToBf16(static_cast<float>(steps.step * direction[d])));
    }
    out.offset_.push_back(static_cast<float>(offset));
    out.inverse_.push_back(static_cast<float>(1 / steps.step));
  }
  out.book_.centre.assign(centre.begin(), centre.end());
  PREFIXD_TRY(out.book_.Validate());
  return out;
}

Status KeyEncoder::Encode(const RowsView& keys, std::span<std::byte> codes) const {
  const size_t components = book_.components();
  if (components == 0) return {};
  std::vector<float> out(components * kEncodeRows), top(components);
  std::vector<uint8_t> coordinates(components);
  for (size_t i = 0; i < components; ++i) top[i] = float((1u << 2 * book_.digits[i]) - 1);
  for (size_t begin = 0; begin < keys.count; begin += kEncodeRows) {
    const size_t rows = std::min(kEncodeRows, keys.count - begin);
    Scores(axes_, static_cast<uint32_t>(components), LayerGeometry{.scale = 1},
           keys.Sub(begin, rows), std::span(out).first(components * rows));
    for (size_t r = 0; r < rows; ++r) {
      for (size_t i = 0; i < components; ++i) {
        const float x = (out[i * rows + r] - offset_[i]) * inverse_[i] + 0.5f;
        if (!std::isfinite(x)) {
          return InvalidArgument("the key of row " + std::to_string(begin + r) +
                                 " is NaN or infinite, or too large for codes");
        }
        coordinates[i] = static_cast<uint8_t>(std::clamp(x, 0.0f, top[i]));
      }
      PackCode(book_, coordinates, begin + r, codes);
    }
  }
  return {};
}

}  // namespace prefixd::index
