// Factors a moment summary's cross moment at low rank.
#include <algorithm>
#include <cassert>
#include <cmath>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "attention/estimators/moments.h"

namespace prefixd {
namespace {

constexpr int kIterations = 30;
constexpr uint32_t kOversampling = 8;
constexpr int kSweeps = 30;
constexpr double kOrthogonal = 1e-12;  // cosine of two images that are left as they are

// Makes the rows of `basis` [n][dim] orthonormal (modified Gram-Schmidt, twice); rows that vanish
// become zero.
void Orthonormalise(std::vector<double>& basis, uint32_t n, uint32_t dim) {
  for (uint32_t a = 0; a < n; ++a) {
    double* row = basis.data() + size_t{a} * dim;
    double before = 0;
    for (uint32_t l = 0; l < dim; ++l) before += row[l] * row[l];
    for (int pass = 0; pass < 2; ++pass) {
      for (uint32_t b = 0; b < a; ++b) {
        const double* other = basis.data() + size_t{b} * dim;
        double dot = 0;
        for (uint32_t l = 0; l < dim; ++l) dot += row[l] * other[l];
        for (uint32_t l = 0; l < dim; ++l) row[l] -= dot * other[l];
      }
    }
    double after = 0;
    for (uint32_t l = 0; l < dim; ++l) after += row[l] * row[l];
    const double inverse = after > 1e-24 * before && after > 0 ? 1 / std::sqrt(after) : 0.0;
    for (uint32_t l = 0; l < dim; ++l) row[l] *= inverse;
  }
}

// out[a] = basis[a] W^T for the matrix w [rows][dim]: [n][rows].
std::vector<double> Project(const std::vector<double>& basis, uint32_t n,
                            const std::vector<double>& w, uint32_t rows, uint32_t dim) {
  std::vector<double> out(size_t{n} * rows);
  for (uint32_t a = 0; a < n; ++a) {
    for (uint32_t j = 0; j < rows; ++j) {
      double dot = 0;
      for (uint32_t l = 0; l < dim; ++l) {
        dot += basis[size_t{a} * dim + l] * w[size_t{j} * dim + l];
      }
      out[size_t{a} * rows + j] = dot;
    }
  }
  return out;
}

// Turns the orthonormal rows of `basis` [n][dim] within their span, until their images W b are
// orthogonal, and sorts them by the images' lengths: then they are the singular vectors of W within
// the span (one-sided Jacobi; Hestenes, 1958).
void TurnToSingularVectors(std::vector<double>& basis, uint32_t n, const std::vector<double>& w,
                           uint32_t rows, uint32_t dim) {
  std::vector<double> image = Project(basis, n, w, rows, dim);
  const auto row = [](std::vector<double>& of, uint32_t a, uint32_t width) {
    return std::span(of).subspan(size_t{a} * width, width);
  };
  const auto dot = [](std::span<const double> x, std::span<const double> y) {
    return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
  };
  bool turned = true;
  for (int sweep = 0; turned && sweep < kSweeps; ++sweep) {
    turned = false;
    for (uint32_t a = 0; a + 1 < n; ++a) {
      for (uint32_t b = a + 1; b < n; ++b) {
        const auto x = row(image, a, rows), y = row(image, b, rows);
        const double xx = dot(x, x), yy = dot(y, y), xy = dot(x, y);
        if (!(std::abs(xy) > kOrthogonal * std::sqrt(xx * yy))) continue;
        turned = true;
        const double zeta = (yy - xx) / (2 * xy);
        const double t = std::copysign(1 / (std::abs(zeta) + std::hypot(1, zeta)), zeta);
        const double cosine = 1 / std::hypot(1, t), sine = cosine * t;
        const auto turn = [&](std::span<double> u, std::span<double> v) {
          for (size_t i = 0; i < u.size(); ++i) {
            const double old = u[i];
            u[i] = cosine * old - sine * v[i];
            v[i] = sine * old + cosine * v[i];
          }
        };
        turn(x, y);
        turn(row(basis, a, dim), row(basis, b, dim));
      }
    }
  }
  std::vector<std::pair<double, uint32_t>> order;
  for (uint32_t a = 0; a < n; ++a) {
    const auto x = row(image, a, rows);
    order.emplace_back(-dot(x, x), a);
  }
  std::ranges::sort(order);
  std::vector<double> sorted;
  for (const auto& [length, a] : order) {
    const auto b = row(basis, a, dim);
    sorted.insert(sorted.end(), b.begin(), b.end());
  }
  basis = std::move(sorted);
}

}  // namespace

// With W = diag(rms), the best approximation of W C of rank r keeps its r leading right singular
// vectors V; so C ~ (C V) V^T. Iterating a block of vectors with (W C)^T (W C) finds a space that
// has them, also where singular values are close; V is then chosen within it.
MomentSummary MomentSummary::Factored(uint32_t rank, std::span<const float> query_rms) const {
  assert(has_cross() && rank >= 1 && rank < std::min(key_dim_, value_dim_));
  assert(query_rms.empty() || query_rms.size() == key_dim_);
  std::vector<double> weighted = cross_;
  for (uint32_t j = 0; j < key_dim_ && !query_rms.empty(); ++j) {
    for (uint32_t l = 0; l < value_dim_; ++l) weighted[size_t{j} * value_dim_ + l] *= query_rms[j];
  }
  const uint32_t block = std::min(rank + kOversampling, value_dim_);
  // Any start serves that is not orthogonal to the singular vectors; a fixed one makes results
  // repeat.
  std::vector<double> basis(size_t{block} * value_dim_);
  uint64_t state = 0x9e3779b97f4a7c15u;
  for (double& x : basis) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    x = static_cast<double>(state >> 11) * 0x1p-53 - 0.5;
  }
  Orthonormalise(basis, block, value_dim_);
  for (int step = 0; step < kIterations; ++step) {
    const std::vector<double> left = Project(basis, block, weighted, key_dim_, value_dim_);
    std::vector<double> next(basis.size());
    for (uint32_t a = 0; a < block; ++a) {
      for (uint32_t j = 0; j < key_dim_; ++j) {
        const double x = left[size_t{a} * key_dim_ + j];
        for (uint32_t l = 0; l < value_dim_; ++l) {
          next[size_t{a} * value_dim_ + l] += x * weighted[size_t{j} * value_dim_ + l];
        }
      }
    }
    basis.swap(next);
    Orthonormalise(basis, block, value_dim_);
  }
  TurnToSingularVectors(basis, block, weighted, key_dim_, value_dim_);
  basis.resize(size_t{rank} * value_dim_);
  return FactoredAlong(basis);
}

MomentSummary MomentSummary::FactoredAlong(std::span<const double> directions) const {
  const auto rank = static_cast<uint32_t>(directions.size() / value_dim_);
  assert(has_cross() && rank >= 1 && rank < std::min(key_dim_, value_dim_));
  assert(directions.size() == size_t{rank} * value_dim_);
  MomentSummary out = Reduced(/*keep_cross=*/false, /*keep_covariance=*/true);
  out.cross_rank_ = rank;
  out.value_factor_.assign(directions.begin(), directions.end());
  const std::vector<double> left = Project(out.value_factor_, rank, cross_, key_dim_, value_dim_);
  out.key_factor_.resize(size_t{key_dim_} * rank);
  for (uint32_t r = 0; r < rank; ++r) {
    for (uint32_t j = 0; j < key_dim_; ++j) {
      out.key_factor_[size_t{j} * rank + r] = left[size_t{r} * key_dim_ + j];
    }
  }
  return out;
}

}  // namespace prefixd
