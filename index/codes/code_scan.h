// Scanning of compact codes (key_codes.h): the kernels, one table per instruction set, chosen at
// run time. All tables return the same integers to the bit, and the same floats: they add in the
// same order and never contract a product and a sum.
//
// Nothing here throws, allocates or checks: callers validate. Thread-safety: pure apart from their
// outputs.
#pragma once

#include <cstddef>
#include <cstdint>

namespace prefixd {

// One group of query heads, as CodeQueries holds it.
struct CodeScanQuery {
  const int8_t* weights = nullptr;  // [heads][fields]
  const int32_t* bias = nullptr;    // [heads]
  size_t heads = 0;
  uint32_t fields = 0;  // a multiple of kCodeGroupFields
  // What block b of `codes` adds for head g: block_bias[g * ld_bias + b]. Null: nothing.
  const int16_t* block_bias = nullptr;
  size_t ld_bias = 0;
};

struct CodeScanTable {
  const char* name;
  // out[g * ld_out + i] = bias[g] + its block's + sum_p weights[g][p] field p of key i, for the
  // 32 n_blocks keys of the blocks of `codes` that `which` names, or of the first ones where that
  // is null (no alignment needed; 64 bytes is fastest). The sums fit int16.
  void (*scan)(const std::byte* codes, const uint32_t* which, size_t n_blocks,
               const CodeScanQuery& query, int16_t* out, size_t ld_out);
  // sum_i exp(mul (v[i] - top)), v[i] <= top, mul >= 0, above ln 2 as if ln 2; each term w
  // within 0.2% or, if that is more, what one unit of v is worth, and 2^-15 sqrt(w).
  double (*weight_sum)(const int16_t* v, size_t n, int16_t top, float mul);
  // sum_i exp(s[i] + shift), each term to 0.1%. s[i] + shift <= 80; below -80 as if -80.
  double (*exp_total)(const float* s, size_t n, float shift);
  // The largest of n >= 1.
  int16_t (*largest)(const int16_t* v, size_t n);
  float (*largest_float)(const float* x, size_t n);
  // out gets, in their order, all x[i] with x[i] >= low but not x[i] >= high, which may be NaN;
  // returns how many. out has room for n, and may be x.
  size_t (*between)(const float* x, size_t n, float low, float high, float* out);
  // How many are at least `floor`. No NaN.
  size_t (*count_from)(const float* x, size_t n, float floor);
  // out gets, ascending, every i < n with x[i] >= floor; returns how many. out has room for n.
  size_t (*places_from)(const float* x, size_t n, float floor, uint32_t* out);
  // out[i] = mul v[i], to the nearest whole number, of two the even one; |mul v[i]| < 2^15.
  void (*scaled)(const int16_t* v, size_t n, float mul, int16_t* out);
  // out[i] = v[at[i]].
  void (*pick)(const int16_t* v, const uint32_t* at, size_t n, int16_t* out);
  // rank[i] = max(rank[i], mul v[i] + add).
  void (*raise)(const int16_t* v, size_t n, float mul, float add, float* rank);
  // out gets first + i, ascending, of every i < n with v[g * ld + i] > floors[g] for some head g;
  // returns how many. out has room for n.
  size_t (*above)(const int16_t* v, size_t ld, size_t heads, const int16_t* floors, size_t n,
                  uint32_t first, uint32_t* out);
};

// The fastest table this machine can run.
const CodeScanTable& CodeScan();

enum class CodeScanIsa { kGeneric, kAvx2, kAvx512Vnni };
// nullptr when this build or this machine has no such kernels. For tests and benchmarks.
const CodeScanTable* CodeScanFor(CodeScanIsa isa);

}  // namespace prefixd
