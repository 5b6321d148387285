#include "decoder/model/ops.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>

#include "decoder/parallel.h"

namespace prefixd::decoder {

namespace {

float Dot(const float* a, const float* b, size_t n) {
  constexpr size_t kDotLanes = 16;  // independent sums, so that the compiler can use vectors
  float lanes[kDotLanes] = {};
  size_t i = 0;
  for (; i + kDotLanes <= n; i += kDotLanes) {
    for (size_t l = 0; l < kDotLanes; ++l) lanes[l] += a[i + l] * b[i + l];
  }
  float sum = 0;
  for (; i < n; ++i) sum += a[i] * b[i];
  for (const float lane : lanes) sum += lane;
  return sum;
}

// Multiplies one token, as decoding does. Its time is the time to read the matrix once.
void LinearOne(const Matrix& weights, const float* x, float* y) {
  constexpr size_t kRows = 128;
  const size_t rows = weights.rows, cols = weights.cols;
  ParallelFor((rows + kRows - 1) / kRows, rows * cols, [&](size_t block) {
    const size_t end = std::min(rows, (block + 1) * kRows);
    for (size_t r = block * kRows; r < end; ++r) {
      y[r] = Dot(weights.data.data() + r * cols, x, cols);
    }
  });
}

}  // namespace

void Linear(const Matrix& weights, std::span<const float> x, uint32_t n, std::span<float> y) {
  if (n == 1) return LinearOne(weights, x.data(), y.data());
  // Each task computes one block of the output: up to kTokens tokens by kRows rows of the matrix.
  constexpr size_t kTokens = 128, kRows = 256;
  const size_t rows = weights.rows, cols = weights.cols;
  const size_t row_blocks = (rows + kRows - 1) / kRows, token_blocks = (n + kTokens - 1) / kTokens;
  ParallelFor(token_blocks * row_blocks, size_t{n} * rows * cols, [&](size_t i) {
    const size_t token = i / row_blocks * kTokens, row = i % row_blocks * kRows;
    const auto m = static_cast<int>(std::min(kTokens, n - token));
    const auto width = static_cast<int>(std::min(kRows, rows - row));
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, width, static_cast<int>(cols), 1.0f,
                x.data() + token * cols, static_cast<int>(cols), weights.data.data() + row * cols,
                static_cast<int>(cols), 0.0f, y.data() + token * rows + row,
                static_cast<int>(rows));
  });
}

void RmsNorm(std::span<const float> weight, float eps, std::span<const float> x, uint32_t n,
             std::span<float> y) {
  const size_t width = weight.size();
  for (uint32_t i = 0; i < n; ++i) {
    const float* in = x.data() + i * width;
    float* out = y.data() + i * width;
    double squares = 0;
    for (size_t j = 0; j < width; ++j) squares += double{in[j]} * in[j];
    const auto scale = static_cast<float>(1.0 / std::sqrt(squares / double(width) + double{eps}));
    for (size_t j = 0; j < width; ++j) out[j] = in[j] * scale * weight[j];
  }
}

void SwiGlu(std::span<float> gate, std::span<const float> up) {
  for (size_t i = 0; i < gate.size(); ++i) {
    gate[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
  }
}

void AddTo(std::span<float> x, std::span<const float> y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

}  // namespace prefixd::decoder
