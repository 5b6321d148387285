#include "index/code_search/row_order.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numeric>
#include <utility>

namespace prefixd::index {
namespace {

constexpr size_t kPad = 16;              // features are padded with zeros to whole vectors
constexpr size_t kDirectionRows = 2048;  // a direction is found on at most so many rows
constexpr int kPowerRounds = 3, kMeansRounds = 4;

size_t PadUp(size_t n) { return (n + kPad - 1) / kPad * kPad; }

float Dot(const float* a, const float* b, size_t padded) {
  float lanes[kPad] = {};
  for (size_t j = 0; j < padded; j += kPad) {
    for (size_t l = 0; l < kPad; ++l) lanes[l] += a[j + l] * b[j + l];
  }
  return std::accumulate(lanes, lanes + kPad, 0.0f);
}

void AddScaled(float scale, const float* x, size_t padded, float* sum) {
  for (size_t j = 0; j < padded; ++j) sum[j] += scale * x[j];
}

// Points whose distances say how alike rows are: [n][width].
struct Features {
  size_t width = 0;
  std::vector<float> values;

  Features(size_t n, size_t columns) : width(PadUp(columns)), values(n * width) {}
  float* row(size_t i) { return &values[i * width]; }
  const float* row(size_t i) const { return &values[i * width]; }
};

Features KeyFeatures(const RowsView& keys) {
  const size_t dim = keys.shape.key_dim;
  Features out(keys.count, dim);
  for (size_t i = 0; i < keys.count; ++i) {
    const std::span<float> row(out.row(i), dim);
    ToFloat(keys.shape.dtype, keys.key(i), row);
    for (float& x : row) x = std::isfinite(x) ? x : 0;
  }
  return out;
}

// Recursive balanced bisection: each part is cut across the direction in which its points differ
// most, at a whole number of pages.
class Bisection {
 public:
  Bisection(const Features& points, size_t n, uint32_t rows_per_page)
      : points_(points), rows_per_page_(rows_per_page), order_(n), along_(n) {
    std::iota(order_.begin(), order_.end(), 0);
    mean_.resize(points.width);
    direction_.resize(points.width);
    next_.resize(points.width);
  }

  std::vector<uint32_t> Run() {
    std::vector<std::pair<size_t, size_t>> parts = {{0, order_.size()}};
    while (!parts.empty()) {
      const auto [begin, end] = parts.back();
      parts.pop_back();
      if (end - begin <= rows_per_page_) {
        std::sort(order_.begin() + ptrdiff_t(begin), order_.begin() + ptrdiff_t(end));
        continue;
      }
      const size_t pages = (end - begin + rows_per_page_ - 1) / rows_per_page_;
      const size_t middle = begin + pages / 2 * rows_per_page_;
      Split(begin, middle, end);
      parts.emplace_back(middle, end);
      parts.emplace_back(begin, middle);
    }
    return std::move(order_);
  }

 private:
  std::span<uint32_t> Part(size_t begin, size_t end) {
    return std::span(order_).subspan(begin, end - begin);
  }

  // Mean of every `stride`-th row of a part, into `sum`.
  void Mean(std::span<const uint32_t> rows, size_t stride, std::vector<float>& sum) const {
    std::fill(sum.begin(), sum.end(), 0.0f);
    size_t n = 0;
    for (size_t i = 0; i < rows.size(); i += stride, ++n) {
      AddScaled(1, points_.row(rows[i]), points_.width, sum.data());
    }
    for (float& x : sum) x /= float(n);
  }

  // Some steps of the power method on the covariance, from the point farthest from the mean.
  void PrincipalDirection(std::span<const uint32_t> rows, size_t stride) {
    Mean(rows, stride, mean_);
    float farthest = -1;
    for (size_t i = 0; i < rows.size(); i += stride) {
      next_.assign(points_.row(rows[i]), points_.row(rows[i]) + points_.width);
      AddScaled(-1, mean_.data(), points_.width, next_.data());
      const float square = Dot(next_.data(), next_.data(), points_.width);
      if (square > farthest) {
        farthest = square;
        direction_ = next_;
      }
    }
    for (int round = 0; round < kPowerRounds; ++round) {
      std::fill(next_.begin(), next_.end(), 0.0f);
      const float offset = Dot(mean_.data(), direction_.data(), points_.width);
      float weight = 0;
      for (size_t i = 0; i < rows.size(); i += stride) {
        const float* x = points_.row(rows[i]);
        const float t = Dot(x, direction_.data(), points_.width) - offset;
        AddScaled(t, x, points_.width, next_.data());
        weight += t;
      }
      AddScaled(-weight, mean_.data(), points_.width, next_.data());
      if (!Normalise()) return;
    }
  }

  // direction_ = next_ / |next_|; false and unchanged when that is no direction.
  bool Normalise() {
    const float norm = std::sqrt(Dot(next_.data(), next_.data(), points_.width));
    if (!(norm > 0) || !std::isfinite(norm)) return false;
    for (float& x : next_) x /= norm;
    direction_.swap(next_);
    return true;
  }

  // Orders a part by its place along direction_ so that the first `left` rows come before the
  // others; equal places keep their order of arrival.
  void Cut(std::span<uint32_t> rows, size_t left) {
    for (const uint32_t i : rows) {
      const float along = Dot(points_.row(i), direction_.data(), points_.width);
      along_[i] = std::isfinite(along) ? along : 0;  // huge keys overflow
    }
    std::nth_element(rows.begin(), rows.begin() + ptrdiff_t(left), rows.end(),
                     [&](uint32_t a, uint32_t b) {
                       return along_[a] != along_[b] ? along_[a] < along_[b] : a < b;
                     });
  }

  void Split(size_t begin, size_t middle, size_t end) {
    const std::span<uint32_t> rows = Part(begin, end);
    const size_t left = middle - begin;
    const size_t stride = (rows.size() + kDirectionRows - 1) / kDirectionRows;
    std::sort(rows.begin(), rows.end());
    PrincipalDirection(rows, stride);
    Cut(rows, left);
    // Balanced 2-means: cut across the line that joins the two means.
    for (int round = 0; round < kMeansRounds; ++round) {
      Mean(rows.first(left), stride, mean_);
      Mean(rows.subspan(left), stride, next_);
      AddScaled(-1, mean_.data(), points_.width, next_.data());
      if (!Normalise()) return;
      Cut(rows, left);
    }
  }

  const Features& points_;
  const size_t rows_per_page_;
  std::vector<uint32_t> order_;
  std::vector<float> along_;  // by row
  std::vector<float> mean_, direction_, next_;
};

}  // namespace

std::vector<uint32_t> ClusterOrder(const RowsView& keys, uint32_t rows_per_page) {
  assert(rows_per_page > 0);
  const Features points = KeyFeatures(keys);
  return Bisection(points, keys.count, rows_per_page).Run();
}

}  // namespace prefixd::index
