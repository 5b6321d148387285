#include "measure/timing/gemm_rate.h"

#include <cblas.h>

#include <algorithm>
#include <chrono>
#include <vector>

namespace prefixd::bench {

double GemmFlops(double seconds) {
  constexpr int kTokens = 512, kWidth = 1024;
  std::vector<float> a(kTokens * kWidth, 0.5f), b(kWidth * kWidth, 0.25f), c(kTokens * kWidth);
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  double best = 0;
  do {
    const auto begun = Clock::now();
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, kTokens, kWidth, kWidth, 1.0f, a.data(),
                kWidth, b.data(), kWidth, 0.0f, c.data(), kWidth);
    const double took = std::chrono::duration<double>(Clock::now() - begun).count();
    best = std::max(best, 2.0 * kTokens * kWidth * kWidth / took);
  } while (Clock::now() < end);
  return best;
}

}  // namespace prefixd::bench
