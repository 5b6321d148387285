// The bf16 dot product instructions are not used: queries are never rounded to bf16, and splitting
// them into three bf16 parts costs more than converting rows, without the float64 sums that the
// step's error bound needs.
#define PREFIXD_LANES 16
#define PREFIXD_TABLE kAvx512Kernels
#define PREFIXD_TABLE_NAME "avx512"
#include "attention/kernels_body.h"
