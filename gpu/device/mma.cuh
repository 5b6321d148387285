// Computes tensor-core products of 16 x 8 x 16 tiles in bf16, and splits float32 numbers into sums
// of bf16 parts. Internal to gpu/. The emulation of both is in tests/gpu/emulated/emulated_cuda.h.
//
// Fragments, with r = lane / 4 and c = lane % 4 (PTX ISA, mma.m16n8k16): in A [16][16], a word
// holds two neighbouring columns: a[0] (r, 2c), a[1] (r + 8, 2c), a[2] (r, 2c + 8), a[3] (r + 8, 2c
// + 8). In B [16][8], a word holds two neighbouring rows of column r: b[0] rows 2c, 2c + 1, b[1]
// rows 2c + 8, 2c + 9. C [16][8] has c[0..1] (r, 2c), (r, 2c + 1), c[2..3] (r + 8, same columns).
#pragma once

#include "gpu/device/launch.cuh"

namespace prefixd::gpu::internal {

#if defined(__CUDACC__)

// Computes c += A B. All lanes of a warp call it: volatile, so that no compiler moves it to where
// only some lanes use the result.
__device__ inline void Mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads four 8 x 8 matrices of 16-bit elements from shared memory: each lane gives the address of
// one row of 16 bytes, lanes 8 i .. 8 i + 7 those of matrix i, and gets of matrix i the word of row
// r with columns 2c, 2c + 1; transposed, of column r rows 2c, 2c + 1. All lanes of a warp call it.
__device__ inline void LoadMatrices(uint32_t (&out)[4], const uint32_t* row) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(at));
}
__device__ inline void LoadTransposed(uint32_t (&out)[4], const uint32_t* row) {
  const auto at = static_cast<uint32_t>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(at));
}

// Returns bf16(low) in the lower half, bf16(high) in the upper, rounded to nearest even.
__device__ inline uint32_t PackBf16(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

#endif

__device__ inline float LowBf16(uint32_t word) { return __uint_as_float(word << 16); }
__device__ inline float HighBf16(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }

// Splits the pair (x, y) into kParts words, each the bf16 of the remainder after the former ones.
template <uint32_t kParts>
__device__ inline void SplitPair(float x, float y, uint32_t (&parts)[kParts]) {
#pragma unroll
  for (uint32_t p = 0; p < kParts; ++p) {
    parts[p] = PackBf16(x, y);
    x -= LowBf16(parts[p]);
    y -= HighBf16(parts[p]);
  }
}

}  // namespace prefixd::gpu::internal
