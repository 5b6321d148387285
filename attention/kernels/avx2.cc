#define PREFIXD_LANES 8
#define PREFIXD_TABLE kAvx2Kernels
#define PREFIXD_TABLE_NAME "avx2"
#include "attention/kernels/body.h"
