// Marks functions that kernels and host tests share.
#pragma once

#if defined(__CUDACC__)
#define PREFIXD_HD __host__ __device__
#else
#define PREFIXD_HD
#endif
