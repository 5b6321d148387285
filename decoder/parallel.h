// Loops over the cores, in coarse pieces that are handed out as threads become free: a busy machine
// delays one piece, not every multiplication (OpenBLAS's own threads meet after each).
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace prefixd::decoder {

// Calls body(i) once for each i in [0, n), concurrently on OpenMP's threads unless `work`, in
// multiply-adds over all of them, is too small to be worth it. BLAS calls made by a body run on
// its thread alone. Bodies must not touch one another's output, and must not throw.
void ParallelFor(size_t n, size_t work, const std::function<void(size_t)>& body);

// How many threads loops started by the calling thread use; 0 leaves it as it is (all cores, or
// OMP_NUM_THREADS).
void SetThreads(uint32_t threads);

}  // namespace prefixd::decoder
