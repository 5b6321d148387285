// Runs loops over the cores. Threads take coarse tasks as they become free, so that a busy core
// delays one task and not every multiplication (OpenBLAS's own threads meet after each one).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace prefixd::decoder {

// Calls body(i) once for each i in [0, n), concurrently on OpenMP's threads. The loop stays on the
// calling thread where `work`, the multiply-adds of the whole loop, is too small to pay for
// threads. BLAS calls of a body run on its thread alone. Bodies must not write one another's
// output, and must not throw.
void ParallelFor(size_t n, size_t work, const std::function<void(size_t)>& body);

// Sets how many threads loops use that the calling thread starts; 0 leaves it as it is (all cores,
// or OMP_NUM_THREADS).
void SetThreads(uint32_t threads);

}  // namespace prefixd::decoder
