#include "index/code_search/code_training.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "attention/step/step.h"
#include "index/code_search/code_steps.h"
#include "index/code_search/row_order.h"
#include "index/code_search/symmetric_eigen.h"

namespace prefixd::index {
namespace {

// Keys beyond have no squares in float32.
constexpr float kLargest = 1e17f;
constexpr size_t kMeanKeys = 8192, kFitKeys = 8192, kFitSteps = 4096;

// y = matrix (x - origin), of many x at once.
class Turn {
 public:
  Turn(std::span<const double> matrix, std::span<const double> origin, uint32_t dim)
      : rows_(static_cast<uint32_t>(matrix.size() / dim)), offset_(rows_) {
    matrix_.assign(matrix.begin(), matrix.end());
    for (uint32_t i = 0; i < rows_; ++i) {
      double sum = 0;
      for (uint32_t d = 0; d < dim; ++d) sum += matrix[size_t{i} * dim + d] * origin[d];
      offset_[i] = static_cast<float>(sum);
    }
  }
  // out: [x.count][rows()]
  void operator()(const RowsView& x, std::vector<float>& out) {
    out.resize(x.count * rows_);
    for (size_t begin = 0; begin < x.count; begin += kSome) {
      const size_t some = std::min(kSome, x.count - begin);
      block_.resize(rows_ * some);
      Scores(matrix_, rows_, LayerGeometry{.scale = 1}, x.Sub(begin, some), block_);
      for (size_t r = 0; r < some; ++r) {
        float* to = out.data() + (begin + r) * rows_;
        for (uint32_t i = 0; i < rows_; ++i) to[i] = block_[i * some + r] - offset_[i];
      }
    }
  }
  uint32_t rows() const { return rows_; }

 private:
  static constexpr size_t kSome = 256;
  uint32_t rows_;
  std::vector<float> matrix_, offset_, block_;
};

RowsView FloatRows(std::span<const float> values, uint32_t dim) {
  const RowShape shape{dim, 0, DType::kF32};
  return {reinterpret_cast<const std::byte*>(values.data()), values.size() / dim, shape.bytes(),
          shape};
}

// Keys in blocks: what is known before there are codes.
struct Blocks {
  std::vector<uint16_t> tokens;  // as BlockCodes has them
  std::vector<float> means;      // [n_blocks][dim]
  size_t stride = 1;             // of the blocks that are sampled
  std::vector<float> residuals;  // [keys of sampled blocks][dim]
};

// Keys less `origin`; names the row of one that is not finite.
Result<Blocks> FormBlocks(const RowsView& keys, std::span<const double> origin) {
  const uint32_t dim = keys.shape.key_dim;
  Blocks out;
  const size_t n_blocks = CodeBlocks(keys.count);
  out.stride = std::max<size_t>(1, n_blocks / (kFitKeys / kCodeBlockKeys));
  out.means.resize(n_blocks * dim);
  std::vector<float> y;
  for (size_t begin = 0; begin < keys.count; begin += kWindowKeys) {
    const size_t n = std::min<size_t>(kWindowKeys, keys.count - begin);
    y.resize(n * dim);
    for (size_t i = 0; i < n; ++i) {
      const std::span<float> row(y.data() + i * dim, dim);
      ToFloat(keys.shape.dtype, keys.key(begin + i), row);
      for (uint32_t d = 0; d < dim; ++d) {
        row[d] -= static_cast<float>(origin[d]);
        // Squares of it are summed.
        if (!(std::fabs(row[d]) < kLargest)) {
          return InvalidArgument("the key of row " + std::to_string(begin + i) +
                                 " is NaN or infinite, or too large for codes");
        }
      }
    }
    const std::vector<uint32_t> order = ClusterOrder(FloatRows(y, dim), kCodeBlockKeys);
    out.tokens.insert(out.tokens.end(), order.begin(), order.end());
    for (size_t at = 0; at < n; at += kCodeBlockKeys) {
      const size_t block = (begin + at) / kCodeBlockKeys;
      const size_t in_block = std::min<size_t>(kCodeBlockKeys, n - at);
      float* mean = out.means.data() + block * dim;
      for (size_t j = 0; j < in_block; ++j) {
        const float* row = y.data() + size_t{order[at + j]} * dim;
        for (uint32_t d = 0; d < dim; ++d) mean[d] += row[d] / float(in_block);
      }
      if (block % out.stride != 0) continue;
      for (size_t j = 0; j < in_block; ++j) {
        const float* row = y.data() + size_t{order[at + j]} * dim;
        for (uint32_t d = 0; d < dim; ++d) out.residuals.push_back(row[d] - mean[d]);
      }
    }
  }
  out.tokens.resize(n_blocks * kCodeBlockKeys, kNoKey);
  return out;
}

// sum over rows of row^T row / rows: [dim][dim]. Some rows are summed in float32, all in float64.
std::vector<double> SecondMoment(std::span<const float> rows, uint32_t dim) {
  constexpr size_t kSome = 64;
  std::vector<double> m(size_t{dim} * dim);
  std::vector<float> some(m.size());
  const size_t n = rows.size() / dim;
  for (size_t begin = 0; begin < n; begin += kSome) {
    std::fill(some.begin(), some.end(), 0.0f);
    for (size_t r = begin; r < std::min(n, begin + kSome); ++r) {
      const float* row = rows.data() + r * dim;
      for (uint32_t a = 0; a < dim; ++a) {
        float* __restrict out = some.data() + size_t{a} * dim;
        const float x = row[a];
        for (uint32_t b = 0; b <= a; ++b) out[b] += x * row[b];
      }
    }
    for (size_t i = 0; i < m.size(); ++i) m[i] += some[i];
  }
  for (uint32_t a = 0; a < dim; ++a) {
    for (uint32_t b = 0; b <= a; ++b) {
      m[size_t{a} * dim + b] /= double(n);
      m[size_t{b} * dim + a] = m[size_t{a} * dim + b];
    }
  }
  return m;
}

// Variance along each axis of rows [n][dim] of coordinates.
std::vector<double> Variances(std::span<const float> rows, uint32_t dim) {
  const size_t n_rows = rows.size() / dim;
  const auto n = static_cast<double>(n_rows);
  std::vector<double> sum(dim), square(dim);
  for (size_t i = 0; i < rows.size(); ++i) sum[i % dim] += rows[i];
  for (size_t i = 0; i < rows.size(); ++i) {
    const double miss = rows[i] - sum[i % dim] / n;
    square[i % dim] += miss * miss;
  }
  for (double& x : square) x /= n;
  return square;
}

// One axis of key space with the quantisers of means and of keys.
struct Axis {
  uint8_t mean_digits = 0, key_digits = 0;
  Steps mean, key;
  double variance = 0;  // of what means leave

  bool coded() const { return mean_digits > 0 || key_digits > 0; }
  double step() const { return key_digits > 0 ? key.step : mean.step; }
};

uint8_t CodeOf(float x, const Steps& steps, uint8_t digits) {
  const float top = float((1u << 2 * digits) - 1);
  const float c = (x - float(steps.low)) / float(steps.step) + 0.5f;
  return static_cast<uint8_t>(std::clamp(c, 0.0f, top));
}

std::vector<uint8_t> DigitsOf(std::span<const Axis> axes, uint8_t Axis::*which) {
  std::vector<uint8_t> digits;
  for (const Axis& axis : axes) {
    if (axis.coded()) digits.push_back(axis.*which);
  }
  return digits;
}

class Encoder {
 public:
  Encoder(const RowsView& keys, Blocks blocks, std::span<const double> mean, const Eigen& eigen)
      : keys_(keys),
        blocks_(std::move(blocks)),
        dim_(keys.shape.key_dim),
        mean_(mean),
        eigen_(eigen),
        axes_(dim_) {}

  Result<EncodedKeys> Run() {
    FitMeans();
    FitKeys();
    EncodedKeys out{Book(), CodeMemory(BlockLayout(dim_, keys_.count).end)};
    PREFIXD_TRY(out.book.Validate());
    Fill(out);
    return out;
  }

 private:
  // Coordinates of the means, their quantisers, and what these leave of the means in centres_.
  void FitMeans() {
    Turn turn(eigen_.vectors, std::vector<double>(dim_, 0.0), dim_);
    turn(FloatRows(blocks_.means, dim_), centres_);
    const std::vector<double> variances = Variances(centres_, dim_);
    const std::vector<uint8_t> digits = AllocateDigits(variances, CodeFields(dim_));
    const size_t n = centres_.size() / dim_, stride = (n + kFitSteps - 1) / kFitSteps;
    mean_codes_.resize(centres_.size());
    missed_.resize(centres_.size());
    std::vector<float> sample;
    for (uint32_t i = 0; i < dim_; ++i) {
      Axis& axis = axes_[i];
      axis.variance = std::max(0.0, eigen_.values[i]);
      sample.clear();
      for (size_t b = 0; b < n; b += stride) sample.push_back(centres_[b * dim_ + i]);
      if (digits[i] > 0) axis.mean = FitSteps(sample, 1u << 2 * digits[i]);
      if (digits[i] > 0 && axis.mean.step > 0) axis.mean_digits = digits[i];
      double left = 0;
      for (size_t b = 0; b < n; ++b) {
        float& x = centres_[b * dim_ + i];
        const float truth = x;
        x = 0;
        if (axis.mean_digits > 0) {
          const uint8_t c = CodeOf(truth, axis.mean, axis.mean_digits);
          mean_codes_[b * dim_ + i] = c;
          x = static_cast<float>(axis.mean.low + axis.mean.step * c);
        }
        left += (truth - x) * double{truth - x} / double(n);
        missed_[b * dim_ + i] = truth - x;
      }
      axis.variance += left;
    }
  }

  void FitKeys() {
    std::vector<double> variances;
    variances.reserve(axes_.size());
    for (const Axis& axis : axes_) variances.push_back(axis.variance);
    const std::vector<uint8_t> digits = AllocateDigits(variances, CodeFields(dim_));
    std::vector<float> turned, sample;  // residuals along the axes
    Turn turn(eigen_.vectors, std::vector<double>(dim_, 0.0), dim_);
    turn(FloatRows(blocks_.residuals, dim_), turned);
    const size_t n = turned.size() / dim_, stride = (n + kFitSteps - 1) / kFitSteps;
    for (uint32_t i = 0; i < dim_; ++i) {
      if (digits[i] == 0) continue;
      sample.clear();
      for (size_t r = 0; r < n; r += stride) {
        const size_t block = r / kCodeBlockKeys * blocks_.stride;
        sample.push_back(missed_[block * dim_ + i] + turned[r * dim_ + i]);
      }
      axes_[i].key = FitSteps(sample, 1u << 2 * digits[i]);
      if (axes_[i].key.step > 0) axes_[i].key_digits = digits[i];
    }
  }

  BlockCodeBook Book() const {
    BlockCodeBook book;
    book.keys.key_dim = dim_;
    book.keys.digits = DigitsOf(axes_, &Axis::key_digits);
    book.mean_digits = DigitsOf(axes_, &Axis::mean_digits);
    std::vector<double> centre(mean_.begin(), mean_.end());
    for (uint32_t i = 0; i < dim_; ++i) {
      const Axis& axis = axes_[i];
      if (!axis.coded()) continue;
      const double* v = eigen_.vectors.data() + size_t{i} * dim_;
      const double low =
          (axis.mean_digits > 0 ? axis.mean.low : 0) + (axis.key_digits > 0 ? axis.key.low : 0);
      for (uint32_t b = 0; b < dim_; ++b) {
        centre[b] += low * v[b];
        book.keys.directions.push_back(FloatToBf16(static_cast<float>(axis.step() * v[b])));
      }
      book.mean_ratios.push_back(
          axis.mean_digits > 0 ? static_cast<float>(axis.mean.step / axis.step()) : 0);
      book.variances.push_back(static_cast<float>(axis.variance / (axis.step() * axis.step())));
    }
    book.keys.centre.assign(centre.begin(), centre.end());
    return book;
  }

  void Fill(EncodedKeys& out) const {
    const BlockLayout layout(dim_, keys_.count);
    const std::span<std::byte> arrays = out.arrays.bytes();
    auto* tokens = reinterpret_cast<uint16_t*>(arrays.data() + layout.tokens);
    std::copy(blocks_.tokens.begin(), blocks_.tokens.end(), tokens);
    std::vector<uint32_t> coded;
    for (uint32_t i = 0; i < dim_; ++i) {
      if (axes_[i].coded()) coded.push_back(i);
    }
    if (coded.empty()) return;
    const auto pack_means = arrays.subspan(layout.means, layout.tokens - layout.means);
    CodeBook of_means{dim_, {}, out.book.mean_digits, {}};
    std::vector<uint8_t> code(coded.size());
    for (size_t b = 0; b < layout.n_blocks; ++b) {
      for (size_t c = 0; c < coded.size(); ++c) code[c] = mean_codes_[b * dim_ + coded[c]];
      PackCode(of_means, code, b, pack_means);
    }
    std::vector<double> matrix;
    for (const uint32_t i : coded) {
      const double* v = eigen_.vectors.data() + size_t{i} * dim_;
      matrix.insert(matrix.end(), v, v + dim_);
    }
    Turn turn(matrix, mean_, dim_);
    std::vector<float> x;
    const auto pack_keys = arrays.first(layout.means);
    for (size_t begin = 0; begin < keys_.count; begin += kWindowKeys) {
      const size_t n = std::min<size_t>(kWindowKeys, keys_.count - begin);
      turn(keys_.Sub(begin, n), x);
      for (size_t place = begin; place < begin + n; ++place) {
        const float* row = x.data() + size_t{blocks_.tokens[place]} * coded.size();
        const float* centre = centres_.data() + place / kCodeBlockKeys * dim_;
        for (size_t c = 0; c < coded.size(); ++c) {
          const Axis& axis = axes_[coded[c]];
          code[c] = axis.key_digits == 0
                        ? uint8_t{0}
                        : CodeOf(row[c] - centre[coded[c]], axis.key, axis.key_digits);
        }
        PackCode(out.book.keys, code, place, pack_keys);
      }
    }
  }

  const RowsView& keys_;
  const Blocks blocks_;
  const uint32_t dim_;
  const std::span<const double> mean_;
  const Eigen& eigen_;
  std::vector<Axis> axes_;
  std::vector<float> centres_, missed_;  // [n_blocks][dim]: what means' codes say, and miss
  std::vector<uint8_t> mean_codes_;
};

}  // namespace

Result<EncodedKeys> EncodeKeys(const RowsView& keys) {
  const uint32_t dim = keys.shape.key_dim;
  if (keys.count == 0 || dim == 0) return InvalidArgument("codes need keys");
  const size_t stride = std::max<size_t>(1, keys.count / kMeanKeys);
  std::vector<double> mean(dim, 0.0);
  std::vector<float> row(dim);
  size_t n = 0;
  for (size_t i = 0; i < keys.count; i += stride, ++n) {
    ToFloat(keys.shape.dtype, keys.key(i), row);
    for (uint32_t d = 0; d < dim; ++d) mean[d] += std::isfinite(row[d]) ? row[d] : 0;
  }
  for (double& x : mean) x /= double(n);
  PREFIXD_ASSIGN(Blocks blocks, FormBlocks(keys, mean));
  PREFIXD_ASSIGN(const Eigen eigen, SymmetricEigen(SecondMoment(blocks.residuals, dim), dim));
  return Encoder(keys, std::move(blocks), mean, eigen).Run();
}

}  // namespace prefixd::index
