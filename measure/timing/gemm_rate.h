// Measures how fast this machine multiplies matrices, for an estimate of what a prefill takes here.
#pragma once

namespace prefixd::bench {

// Returns the floating-point operations per second of products of float32 matrices as a prefill
// has them (512 tokens), by OpenBLAS on its own number of threads: the best of products that take
// `seconds` together. Thread-safety: as OpenBLAS's.
double GemmFlops(double seconds);

}  // namespace prefixd::bench
