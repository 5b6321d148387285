// As AVX-512, and sums of bf16 squares by the dot product of pairs (kernels_sums.h). Scores do not
// use it: queries are never rounded to bf16, and splitting them into three bf16 parts would leave
// sums in float32, where the step's error bound needs float64.
#define PREFIXD_LANES 16
#define PREFIXD_BF16_PAIRS 1
#define PREFIXD_TABLE kAvx512Bf16Kernels
#define PREFIXD_TABLE_NAME "avx512_bf16"
#include "attention/kernels_body.h"
