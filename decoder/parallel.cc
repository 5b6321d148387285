#include "decoder/parallel.h"

#include <omp.h>

namespace prefixd::decoder {

void ParallelFor(size_t n, size_t work, const std::function<void(size_t)>& body) {
  constexpr size_t kWorthThreads = 4 << 20;  // about a tenth of a millisecond on one core
  const bool parallel = n > 1 && work >= kWorthThreads;
#pragma omp parallel for schedule(dynamic, 1) if (parallel)
  for (size_t i = 0; i < n; ++i) body(i);
}

void SetThreads(uint32_t threads) {
  if (threads > 0) omp_set_num_threads(static_cast<int>(threads));
}

}  // namespace prefixd::decoder
