// Selects the inner loops of attention/ at run time, one table per instruction set.
//
// Internal to attention/. Vectors are GCC vector extensions, so one body (body.h) serves every
// instruction set; avx2.cc, avx512.cc and generic.cc compile it with their own flags. Kernels do
// not throw, allocate or check: callers validate. No kernel reads outside the elements it is given.
//
// Thread-safety: all functions are pure apart from their outputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "prefixd/dtype.h"
#include "prefixd/row_ref.h"

namespace prefixd {

// Query-side matrices are padded with zeros to a multiple of this many columns.
inline constexpr size_t kKernelPad = 16;
constexpr size_t PadUp(size_t n) { return (n + kKernelPad - 1) / kKernelPad * kKernelPad; }

// `n` vectors of `dim` elements, unaligned: vector i starts at data + i * stride bytes or, where
// `refs` is set, at refs[i].key (.value with of_values).
struct VectorBlock {
  const std::byte* data = nullptr;
  size_t stride = 0;
  size_t n = 0;
  uint32_t dim = 0;
  DType dtype = DType::kF32;
  const RowRef* refs = nullptr;
  bool of_values = false;
  // Kernels may prefetch vectors [0, ahead), which must exist and be used soon; ahead may exceed n.
  // ahead_key_bytes and ahead_value_bytes count the bytes of the key and of the value behind it;
  // with a stride they are adjacent, and data is where the first of them starts. With refs, kernels
  // also read these bytes (key or value, as of_values says) in vectors [0, n), so they must not
  // exceed the elements. in_runs: refs mostly follow one another in memory, a page of them at
  // least, and are prefetched like vectors in order.
  bool in_runs = false;
  size_t ahead = 0;
  size_t ahead_key_bytes = 0;
  size_t ahead_value_bytes = 0;
};

// first + slope * (s - centre), in float32 about a centre near the scores, so that a large common
// score cancels before anything is rounded.
struct Line {
  float first = 0, slope = 0, centre = 0;
};

struct KernelTable {
  const char* name;
  // out[g * ld_out + i] = scale * <q_g, x_i>.  q: [heads][ldq], ldq = PadUp(x.dim), zero-padded.
  void (*dot)(const float* q, size_t ldq, size_t heads, const VectorBlock& x, float scale,
              float* out, size_t ld_out);
  // Computes dot with products and sums in float64: exact but for the final rounding to float32,
  // however much the terms cancel.
  void (*score)(const double* q, size_t ldq, size_t heads, const VectorBlock& x, double scale,
                float* out, size_t ld_out);
  // Computes score and centred_sums, each to the bit: centre, sum and sum_sq are [x.dim], the sums
  // are added to. Scattered vectors are summed while they come in from memory (with up to 8 heads;
  // with more, sums cost little beside the scores).
  void (*score_and_sums)(const double* q, size_t ldq, size_t heads, const VectorBlock& x,
                         double scale, float* out, size_t ld_out, const float* centre, double* sum,
                         double* sum_sq);
  // acc[g * ld_acc + l] += sum_i w[g * ldw + i] * x_i[l]. Runs of 64 vectors are summed in float32,
  // eight at a time, and added to acc in float64: within 1e-6 of sum_i |w_i x_i|, whatever n.
  void (*weighted_sum)(const float* w, size_t ldw, size_t heads, const VectorBlock& x, double* acc,
                       size_t ld_acc);
  // out[l] += sum_i w[i] * rows[i * columns + l], in float64.
  void (*combine)(const double* w, size_t n, const double* rows, size_t columns, double* out);
  // sum[l] += sum_i (x_i[l] - centre[l]);  sum_sq[l] += sum_i (x_i[l] - centre[l])^2.
  void (*centred_sums)(const VectorBlock& x, const float* centre, double* sum, double* sum_sq);
  // out[i] = exp(s[i] - shift), 0 below the smallest normal float; returns the sum. In place is
  // fine. s finite, s[i] <= shift + 88.
  double (*exp_shifted)(const float* s, size_t n, float shift, float* out);
  // Like exp_shifted, with the same sum, but out[i] = exp(s[i] - shift) - line(s[i]).
  double (*exp_less_line)(const float* s, size_t n, float shift, const Line& line, float* out);
  // sum_i (s[i] - centre), each difference rounded to float32.
  double (*centred_total)(const float* s, size_t n, float centre);
  // Largest element (-inf for n = 0); false if any is NaN or infinite.
  bool (*finite_max)(const float* s, size_t n, float* max);
  // s[i] = cap * tanh(s[i] / cap).
  void (*softcap)(float* s, size_t n, float cap);
  // x[i] = x (1 + erf(x / sqrt 2)) / 2, within 4e-7 max(1, |x|).
  void (*gelu)(float* x, size_t n);
  void (*to_float)(DType dtype, const std::byte* src, size_t n, float* dst);
};

// Returns the fastest table that this machine can run.
const KernelTable& Kernels();

// Kernels do not use the dot products of bf16 pairs that some processors have (AVX512_BF16, AMX):
// these sum in float32, with which scores miss the step's bound, and where float32 is enough they
// are no faster than multiplying the pairs' halves (sums of squares: 5.9 ns a row of 128 against
// 4.7).
enum class Isa { kGeneric, kAvx2, kAvx512 };
inline constexpr Isa kAllIsas[] = {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512};
// Returns nullptr when this build or this machine has no such kernels.
const KernelTable* KernelsFor(Isa isa);

// While one lives, Kernels() returns the given table in every thread. For tests and benchmarks,
// which make one while nothing else computes.
class ScopedKernels {
 public:
  explicit ScopedKernels(const KernelTable& table);
  ~ScopedKernels();
  ScopedKernels(const ScopedKernels&) = delete;
  ScopedKernels& operator=(const ScopedKernels&) = delete;

 private:
  const KernelTable* before_;
};

}  // namespace prefixd
