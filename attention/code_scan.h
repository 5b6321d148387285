// Scanning of compact codes (key_codes.h): the kernels, one table per instruction set, chosen at
// run time. All tables return the same integers to the bit.
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
  const int32_t* bias = nullptr;    // [heads], of the n-th block scanned at n bias_stride
  size_t heads = 0;
  uint32_t fields = 0;  // a multiple of kCodeGroupFields
  size_t bias_stride = 0;
};

struct CodeScanTable {
  const char* name;
  // out[g * ld_out + i] = bias[g] + sum_p weights[g][p] field p of key i, for the 32 n_blocks keys
  // of the blocks of `codes` that `which` names, or of the first ones where that is null (no
  // alignment needed; 64 bytes is fastest). The sums fit int16.
  void (*scan)(const std::byte* codes, const uint32_t* which, size_t n_blocks,
               const CodeScanQuery& query, int16_t* out, size_t ld_out);
  // sum_i exp(mul v[i] + shift), each term to 0.1%. mul v[i] + shift <= 80; below -80 as if -80.
  double (*exp_sum)(const int16_t* v, size_t n, float mul, float shift);
  // sum_i exp(s[i] + shift), likewise.
  double (*exp_total)(const float* s, size_t n, float shift);
  // The largest of n >= 1.
  int16_t (*largest)(const int16_t* v, size_t n);
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
