// Four-lane kernels for the machine's baseline (SSE2, NEON).
#define PREFIXD_LANES 4
#define PREFIXD_TABLE kGenericKernels
#define PREFIXD_TABLE_NAME "generic"
#include "attention/kernels/body.h"
