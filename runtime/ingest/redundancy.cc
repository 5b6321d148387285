#include "runtime/ingest/redundancy.h"

#include <algorithm>
#include <cmath>

#include "attention/step/step.h"

namespace prefixd {
namespace {

constexpr uint32_t kBlock = 8;  // keys that are compared with all others in one pass

}  // namespace

std::vector<double> Redundancy(const RowsView& rows, TokenRange region) {
  const uint32_t dim = rows.shape.key_dim;
  const size_t n = rows.count;
  std::vector<float> over_norm(n), key(dim);
  for (size_t t = 0; t < n; ++t) {
    ToFloat(rows.shape.dtype, rows.key(t), key);
    double squares = 0;
    for (const float x : key) squares += double{x} * x;
    over_norm[t] = static_cast<float>(1 / (std::sqrt(squares) + 1e-8));
  }
  std::vector<double> mean(region.size());
  const auto older = static_cast<uint32_t>(
      std::clamp<size_t>(n - std::min<size_t>(n, kRedundantNewest), region.begin, region.end));
  std::vector<float> block(size_t{kBlock} * dim), scores(kBlock * n);
  for (uint32_t begin = region.begin; begin < older; begin += kBlock) {
    const uint32_t count = std::min(kBlock, older - begin);
    for (uint32_t i = 0; i < count; ++i) {
      const auto unit = std::span(block).subspan(size_t{i} * dim, dim);
      ToFloat(rows.shape.dtype, rows.key(begin + i), unit);
      for (float& x : unit) x *= over_norm[begin + i];
    }
    Scores(std::span(block).first(size_t{count} * dim), count, {.scale = 1}, rows,
           std::span(scores).first(count * n));
    for (uint32_t i = 0; i < count; ++i) {
      double sum = 0;
      for (size_t t = 0; t < n; ++t) {
        const double cosine = double{scores[i * n + t]} * over_norm[t];
        if (cosine > kAlike) sum += cosine;
      }
      mean[begin - region.begin + i] = sum / double(n);
    }
  }
  const double most = mean.empty() ? 0 : *std::ranges::max_element(mean);
  for (double& m : mean) m = std::exp(m - most);
  return mean;
}

uint64_t RedundancyBytes(uint64_t rows, const RowShape& shape) {
  return rows * (kBlock + 1) * sizeof(float) + rows * sizeof(double) +
         uint64_t{kBlock + 1} * shape.key_dim * sizeof(float);
}

void TakeOffRedundancy(std::span<const double> redundancy, std::span<double> scores) {
  for (size_t i = 0; i < scores.size(); ++i) {
    scores[i] = kGlobalWeight * scores[i] - (1 - kGlobalWeight) * redundancy[i];
  }
}

}  // namespace prefixd
