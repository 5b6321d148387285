#define PREFIXD_LANES 16
#define PREFIXD_TABLE kAvx512Kernels
#define PREFIXD_TABLE_NAME "avx512"
#include "attention/kernels/body.h"
