// Defines one kernel table. Each of avx2.cc, avx512.cc and generic.cc includes it once, and sets
// PREFIXD_LANES (floats per vector), PREFIXD_TABLE and PREFIXD_TABLE_NAME.
//
// Everything is internal to the including file and uses no standard-library template: code built
// with wider instruction sets must not leak into functions that other files share. So the parts are
// included inside the unnamed namespace, and have no include guards of use elsewhere.

#if PREFIXD_LANES > 4
#include <immintrin.h>
#endif

#include "attention/kernels/kernels.h"

#define PREFIXD_INLINE inline __attribute__((always_inline))

namespace prefixd {
namespace {

#include "attention/kernels/vec.h"
// The parts below use the vectors above.
#include "attention/kernels/dot.h"
#include "attention/kernels/math.h"
#include "attention/kernels/sums.h"
// centred.h uses the conversion to float64 in sums.h.
#include "attention/kernels/centred.h"
// score.h takes centred sums along with the scores.
#include "attention/kernels/score.h"

}  // namespace

extern const KernelTable PREFIXD_TABLE;
const KernelTable PREFIXD_TABLE = {PREFIXD_TABLE_NAME,
                                   DotAny,
                                   ScoreAny,
                                   ScoreAndSumsAny,
                                   WeightedSumAny,
                                   Combine,
                                   CentredSumsAny,
                                   ExpShifted,
                                   ExpLessLine,
                                   CentredTotal,
                                   FiniteMax,
                                   Softcap,
                                   Gelu,
                                   ToFloatAny};

}  // namespace prefixd

#undef PREFIXD_INLINE
