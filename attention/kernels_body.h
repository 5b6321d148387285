// The body of one kernel table. Included once by each kernels_<isa>.cc, which sets PREFIXD_LANES
// (floats per vector), PREFIXD_TABLE and PREFIXD_TABLE_NAME.
//
// Everything is internal to the including file and uses no standard-library template: code built
// with wider instruction sets must not leak into functions that other files share.

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "attention/kernels.h"

namespace prefixd {
namespace {

constexpr size_t kLanes = PREFIXD_LANES;
constexpr size_t kRun = 64;           // vectors summed in float32 before going to float64
constexpr size_t kAhead = 16;         // vectors between a prefetch and its use
constexpr size_t kConvertMax = 1024;  // widest vector that is converted ahead

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));

#define PREFIXD_INLINE inline __attribute__((always_inline))

PREFIXD_INLINE VecF Broadcast(float x) { return VecF{} + x; }
PREFIXD_INLINE VecF LoadFloats(const float* p) {
  VecF v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
PREFIXD_INLINE void StoreFloats(float* p, VecF v) { __builtin_memcpy(p, &v, sizeof v); }

typedef float Vec4 __attribute__((vector_size(16)));

// Adds halves onto each other until four lanes are left.
PREFIXD_INLINE Vec4 FoldToFour(VecF v) {
#if PREFIXD_LANES == 16
  typedef float Vec8 __attribute__((vector_size(32)));
  const Vec8 half = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                    __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) +
         __builtin_shufflevector(half, half, 4, 5, 6, 7);
#elif PREFIXD_LANES == 8
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  return v;
#endif
}

// The four sums of four vectors' lanes.
PREFIXD_INLINE Vec4 SumFour(VecF va, VecF vb, VecF vc, VecF vd) {
  const Vec4 a = FoldToFour(va), b = FoldToFour(vb), c = FoldToFour(vc), d = FoldToFour(vd);
  const Vec4 ab =
      __builtin_shufflevector(a, b, 0, 4, 2, 6) + __builtin_shufflevector(a, b, 1, 5, 3, 7);
  const Vec4 cd =
      __builtin_shufflevector(c, d, 0, 4, 2, 6) + __builtin_shufflevector(c, d, 1, 5, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

PREFIXD_INLINE float SumLanes(VecF v) { return SumFour(v, v, v, v)[0]; }

// Element types: how kLanes consecutive elements become floats.
struct F32 {
  static constexpr size_t kBytes = 4;
  static PREFIXD_INLINE VecF Load(const std::byte* p) {
    VecF v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
};
struct Bf16 {
  static constexpr size_t kBytes = 2;
  static PREFIXD_INLINE VecF Load(const std::byte* p) {
    VecH h;
    __builtin_memcpy(&h, p, sizeof h);
#if PREFIXD_LANES == 16
    // One instruction where GCC 12 makes two halves of __builtin_convertvector. The unmasked
    // intrinsics trip -Wuninitialized inside its own header.
    const VecU wide = (VecU)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h);
#else
    const VecU wide = __builtin_convertvector(h, VecU);
#endif
    return (VecF)(wide << 16);
  }
};
struct F16 {
  static constexpr size_t kBytes = 2;
  static PREFIXD_INLINE VecF Load(const std::byte* p) {
    VecH h;
    __builtin_memcpy(&h, p, sizeof h);
#if defined(__F16C__) && PREFIXD_LANES == 16
    return (VecF)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h);
#elif defined(__F16C__) && PREFIXD_LANES == 8
    return (VecF)_mm256_cvtph_ps((__m128i)h);
#else
    const VecU bits = __builtin_convertvector(h, VecU);
    // Exponent and mantissa moved into place, then scaled by 2^112 to correct the bias: this
    // handles subnormals. Infinity and NaN get the float's all-ones exponent.
    const VecF magnitude = (VecF)((bits & 0x7fffu) << 13) * Broadcast(0x1p112f);
    const VecU special = (VecU)((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return (VecF)((VecU)magnitude | special | ((bits & 0x8000u) << 16));
#endif
  }
};

// The last `n` < kLanes elements, zeros behind them.
template <typename E>
PREFIXD_INLINE VecF LoadTail(const std::byte* p, size_t n) {
  alignas(64) std::byte padded[kLanes * E::kBytes] = {};
  __builtin_memcpy(padded, p, n * E::kBytes);
  return E::Load(padded);
}

// ---- dot products ------------------------------------------------------------------------------

// Heads that share a load: as many as registers allow (32 with AVX-512, else 16).
constexpr size_t kDotHeads = kLanes == 16 ? 4 : 2;

// One tile: kHeads queries against kRows vectors, so that each load serves several products.
template <typename E, size_t kHeads, size_t kRows>
PREFIXD_INLINE void DotTile(const float* q, size_t ldq, const std::byte* x, size_t stride,
                            size_t dim, float scale, float* out, size_t ld_out) {
  VecF acc[kHeads][kRows] = {};
  size_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) {
    VecF row[kRows];
    for (size_t r = 0; r < kRows; ++r) row[r] = E::Load(x + r * stride + j * E::kBytes);
    for (size_t g = 0; g < kHeads; ++g) {
      const VecF query = LoadFloats(q + g * ldq + j);
      for (size_t r = 0; r < kRows; ++r) acc[g][r] += query * row[r];
    }
  }
  if (j < dim) {
    for (size_t r = 0; r < kRows; ++r) {
      const VecF row = LoadTail<E>(x + r * stride + j * E::kBytes, dim - j);
      for (size_t g = 0; g < kHeads; ++g) acc[g][r] += LoadFloats(q + g * ldq + j) * row;
    }
  }
  for (size_t g = 0; g < kHeads; ++g) {
    if constexpr (kRows == 4) {
      const Vec4 sums = scale * SumFour(acc[g][0], acc[g][1], acc[g][2], acc[g][3]);
      __builtin_memcpy(out + g * ld_out, &sums, sizeof sums);
    } else {
      for (size_t r = 0; r < kRows; ++r) out[g * ld_out + r] = scale * SumLanes(acc[g][r]);
    }
  }
}

// Hardware prefetchers do not follow a tile's interleaved, gapped rows: ask for them by name.
PREFIXD_INLINE void PrefetchRow(const VectorBlock& x, size_t i) {
  if (i >= x.ahead) return;
  const std::byte* p = x.data + i * x.stride;
  for (size_t line = 0; line < x.ahead_bytes; line += 64) __builtin_prefetch(p + line);
}

template <typename E, size_t kHeads>
void DotHeads(const float* q, size_t ldq, const VectorBlock& x, size_t begin, size_t end,
              float scale, float* out, size_t ld_out, bool prefetch) {
  constexpr size_t kRows = 4;
  size_t i = begin;
  for (; i + kRows <= end; i += kRows) {
    for (size_t r = 0; prefetch && r < kRows; ++r) PrefetchRow(x, i + r + kAhead);
    DotTile<E, kHeads, kRows>(q, ldq, x.data + i * x.stride, x.stride, x.dim, scale, out + i,
                              ld_out);
  }
  for (; i < end; ++i) {
    DotTile<E, kHeads, 1>(q, ldq, x.data + i * x.stride, x.stride, x.dim, scale, out + i, ld_out);
  }
}

template <typename E>
void DotDirect(const float* q, size_t ldq, size_t heads, const VectorBlock& x, float scale,
               float* out, size_t ld_out) {
  constexpr size_t kSlice = 32;  // vectors that stay in the first-level cache over all heads
  for (size_t begin = 0; begin < x.n; begin += kSlice) {
    const size_t end = begin + kSlice < x.n ? begin + kSlice : x.n;
    size_t g = 0;
    for (; g + kDotHeads <= heads; g += kDotHeads) {
      DotHeads<E, kDotHeads>(q + g * ldq, ldq, x, begin, end, scale, out + g * ld_out, ld_out,
                             g == 0);
    }
    for (; g < heads; ++g) {
      DotHeads<E, 1>(q + g * ldq, ldq, x, begin, end, scale, out + g * ld_out, ld_out, g == 0);
    }
  }
}

template <typename E>
void ConvertVector(const std::byte* src, size_t n, float* dst) {
  size_t j = 0;
  for (; j + kLanes <= n; j += kLanes) StoreFloats(dst + j, E::Load(src + j * E::kBytes));
  if (j < n) {
    float tail[kLanes];
    StoreFloats(tail, LoadTail<E>(src + j * E::kBytes, n - j));
    __builtin_memcpy(dst + j, tail, (n - j) * sizeof(float));
  }
}

// With many heads 16-bit vectors are converted once instead of once per tile of heads.
template <typename E>
void Dot(const float* q, size_t ldq, size_t heads, const VectorBlock& x, float scale, float* out,
         size_t ld_out) {
  if (E::kBytes == 4 || heads <= 8 || x.dim > kConvertMax) {
    DotDirect<E>(q, ldq, heads, x, scale, out, ld_out);
    return;
  }
  constexpr size_t kSlice = 16;
  alignas(64) float converted[kSlice * kConvertMax];
  for (size_t begin = 0; begin < x.n; begin += kSlice) {
    const size_t n = x.n - begin < kSlice ? x.n - begin : kSlice;
    for (size_t i = 0; i < n; ++i) {
      PrefetchRow(x, begin + i + kAhead);
      ConvertVector<E>(x.data + (begin + i) * x.stride, x.dim, converted + i * x.dim);
    }
    const VectorBlock slice = {reinterpret_cast<const std::byte*>(converted), x.dim * sizeof(float),
                               n, x.dim, DType::kF32};
    DotDirect<F32>(q, ldq, heads, slice, scale, out + begin, ld_out);
  }
}

void DotAny(const float* q, size_t ldq, size_t heads, const VectorBlock& x, float scale, float* out,
            size_t ld_out) {
  switch (x.dtype) {
    case DType::kF32:
      Dot<F32>(q, ldq, heads, x, scale, out, ld_out);
      break;
    case DType::kF16:
      Dot<F16>(q, ldq, heads, x, scale, out, ld_out);
      break;
    case DType::kBf16:
      Dot<Bf16>(q, ldq, heads, x, scale, out, ld_out);
      break;
  }
}

// ---- weighted sums -----------------------------------------------------------------------------

PREFIXD_INLINE void AddToDouble(double* acc, VecF v, size_t n) {
  float lane[kLanes];
  StoreFloats(lane, v);
  for (size_t l = 0; l < n; ++l) acc[l] += static_cast<double>(lane[l]);
}

// kHeads weight rows over kVecs * kLanes columns (or, with kTail, the last `columns` < kLanes).
template <typename E, size_t kHeads, size_t kVecs, bool kTail>
PREFIXD_INLINE void WeightedTile(const float* w, size_t ldw, const std::byte* x, size_t stride,
                                 size_t n, size_t columns, double* acc, size_t ld_acc) {
  VecF sum[kHeads][kVecs] = {};
  for (size_t i = 0; i < n; ++i) {
    VecF row[kVecs];
    for (size_t c = 0; c < kVecs; ++c) {
      const std::byte* p = x + i * stride + c * kLanes * E::kBytes;
      row[c] = kTail ? LoadTail<E>(p, columns) : E::Load(p);
    }
    for (size_t g = 0; g < kHeads; ++g) {
      const VecF weight = Broadcast(w[g * ldw + i]);
      for (size_t c = 0; c < kVecs; ++c) sum[g][c] += weight * row[c];
    }
  }
  for (size_t g = 0; g < kHeads; ++g) {
    for (size_t c = 0; c < kVecs; ++c) {
      AddToDouble(acc + g * ld_acc + c * kLanes, sum[g][c], kTail ? columns : kLanes);
    }
  }
}

template <typename E, size_t kHeads>
void WeightedHeads(const float* w, size_t ldw, const std::byte* x, size_t stride, size_t n,
                   size_t dim, double* acc, size_t ld_acc) {
  size_t l = 0;
  for (; l + 2 * kLanes <= dim; l += 2 * kLanes) {
    WeightedTile<E, kHeads, 2, false>(w, ldw, x + l * E::kBytes, stride, n, 0, acc + l, ld_acc);
  }
  if (l + kLanes <= dim) {
    WeightedTile<E, kHeads, 1, false>(w, ldw, x + l * E::kBytes, stride, n, 0, acc + l, ld_acc);
    l += kLanes;
  }
  if (l < dim) {
    WeightedTile<E, kHeads, 1, true>(w, ldw, x + l * E::kBytes, stride, n, dim - l, acc + l,
                                     ld_acc);
  }
}

template <typename E>
void WeightedSum(const float* w, size_t ldw, size_t heads, const VectorBlock& x, double* acc,
                 size_t ld_acc) {
  for (size_t begin = 0; begin < x.n; begin += kRun) {
    const size_t n = x.n - begin < kRun ? x.n - begin : kRun;
    const std::byte* data = x.data + begin * x.stride;
    size_t g = 0;
    for (; g + 4 <= heads; g += 4) {
      WeightedHeads<E, 4>(w + g * ldw + begin, ldw, data, x.stride, n, x.dim, acc + g * ld_acc,
                          ld_acc);
    }
    const float* rest = w + g * ldw + begin;
    double* rest_acc = acc + g * ld_acc;
    switch (heads - g) {
      case 1:
        WeightedHeads<E, 1>(rest, ldw, data, x.stride, n, x.dim, rest_acc, ld_acc);
        break;
      case 2:
        WeightedHeads<E, 2>(rest, ldw, data, x.stride, n, x.dim, rest_acc, ld_acc);
        break;
      case 3:
        WeightedHeads<E, 3>(rest, ldw, data, x.stride, n, x.dim, rest_acc, ld_acc);
        break;
      default:
        break;
    }
  }
}

void WeightedSumAny(const float* w, size_t ldw, size_t heads, const VectorBlock& x, double* acc,
                    size_t ld_acc) {
  switch (x.dtype) {
    case DType::kF32:
      WeightedSum<F32>(w, ldw, heads, x, acc, ld_acc);
      break;
    case DType::kF16:
      WeightedSum<F16>(w, ldw, heads, x, acc, ld_acc);
      break;
    case DType::kBf16:
      WeightedSum<Bf16>(w, ldw, heads, x, acc, ld_acc);
      break;
  }
}

// ---- centred first and second moments ----------------------------------------------------------

template <typename E>
void CentredSums(const VectorBlock& x, const float* centre, double* sum, double* sum_sq) {
  for (size_t begin = 0; begin < x.n; begin += kRun) {
    const size_t n = x.n - begin < kRun ? x.n - begin : kRun;
    for (size_t l = 0; l < x.dim; l += kLanes) {
      const size_t columns = x.dim - l < kLanes ? x.dim - l : kLanes;
      const bool whole = columns == kLanes;
      const std::byte* p = x.data + begin * x.stride + l * E::kBytes;
      const std::byte* mid = reinterpret_cast<const std::byte*>(centre + l);
      const VecF c = whole ? F32::Load(mid) : LoadTail<F32>(mid, columns);
      VecF first = {}, second = {};
      for (size_t i = 0; i < n; ++i, p += x.stride) {
        const VecF d = (whole ? E::Load(p) : LoadTail<E>(p, columns)) - c;
        first += d;
        second += d * d;
      }
      AddToDouble(sum + l, first, columns);
      AddToDouble(sum_sq + l, second, columns);
    }
  }
}

void CentredSumsAny(const VectorBlock& x, const float* centre, double* sum, double* sum_sq) {
  switch (x.dtype) {
    case DType::kF32:
      CentredSums<F32>(x, centre, sum, sum_sq);
      break;
    case DType::kF16:
      CentredSums<F16>(x, centre, sum, sum_sq);
      break;
    case DType::kBf16:
      CentredSums<Bf16>(x, centre, sum, sum_sq);
      break;
  }
}

// ---- elementwise -------------------------------------------------------------------------------

PREFIXD_INLINE VecF Select(VecI mask, VecF yes, VecF no) {
  return (VecF)(((VecI)yes & mask) | ((VecI)no & ~mask));
}

// exp by range reduction to [-ln2/2, ln2/2] and a polynomial of degree 6 (Cephes expf); about one
// unit in the last place. Exactly 0 below the smallest normal result.
PREFIXD_INLINE VecF Exp(VecF x) {
  const VecI tiny = x < Broadcast(-87.33654f);
  x = Select(tiny, VecF{}, x);
  x = Select(x > Broadcast(88.37f), Broadcast(88.37f), x);
  // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
  const VecF magic = Broadcast(12582912.0f);
  const VecF biased = x * Broadcast(1.44269504088896341f) + magic;
  const VecF n = biased - magic;
  VecF r = x - n * Broadcast(0.693359375f);
  r = r - n * Broadcast(-2.12194440e-4f);
  VecF p = Broadcast(1.9875691500e-4f);
  p = p * r + Broadcast(1.3981999507e-3f);
  p = p * r + Broadcast(8.3334519073e-3f);
  p = p * r + Broadcast(4.1665795894e-2f);
  p = p * r + Broadcast(1.6666665459e-1f);
  p = p * r + Broadcast(5.0000001201e-1f);
  p = p * (r * r) + r + Broadcast(1.0f);
  const VecI power = ((VecI)biased - (VecI)magic + 127) << 23;
  return Select(tiny, VecF{}, p * (VecF)power);
}

// Cephes tanhf: a polynomial near zero, 1 - 2 / (exp(2|x|) + 1) elsewhere.
PREFIXD_INLINE VecF Tanh(VecF x) {
  const VecF z = x * x;
  VecF p = Broadcast(-5.70498872745e-3f);
  p = p * z + Broadcast(2.06390887954e-2f);
  p = p * z + Broadcast(-5.37397155531e-2f);
  p = p * z + Broadcast(1.33314422036e-1f);
  p = p * z + Broadcast(-3.33332819422e-1f);
  const VecF small = p * z * x + x;
  const VecI sign = (VecI)x & (int32_t)0x80000000u;
  const VecF magnitude = (VecF)((VecI)x & 0x7fffffff);
  const VecF capped = Select(magnitude > Broadcast(20.0f), Broadcast(20.0f), magnitude);
  const VecF large = 1.0f - 2.0f / (Exp(capped + capped) + 1.0f);
  return Select(magnitude < Broadcast(0.625f), small, (VecF)((VecI)large | sign));
}

// Calls `body(vector)` on every full vector of x[0, n) and on the padded tail, storing the result.
template <typename Body>
PREFIXD_INLINE void ForEachVector(const float* x, size_t n, float pad, float* out, Body body) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) StoreFloats(out + i, body(LoadFloats(x + i)));
  if (i < n) {
    float tail[kLanes];
    for (size_t l = 0; l < kLanes; ++l) tail[l] = i + l < n ? x[i + l] : pad;
    StoreFloats(tail, body(LoadFloats(tail)));
    __builtin_memcpy(out + i, tail, (n - i) * sizeof(float));
  }
}

double ExpShifted(const float* s, size_t n, float shift, float* out) {
  double total = 0;
  for (size_t begin = 0; begin < n; begin += kRun * kLanes) {
    const size_t count = n - begin < kRun * kLanes ? n - begin : kRun * kLanes;
    VecF sum = {};
    // A pad of -inf contributes nothing to the sum.
    ForEachVector(s + begin, count, -__builtin_inff(), out + begin, [&](VecF x) {
      const VecF e = Exp(x - Broadcast(shift));
      sum += e;
      return e;
    });
    float lane[kLanes];
    StoreFloats(lane, sum);
    for (size_t l = 0; l < kLanes; ++l) total += static_cast<double>(lane[l]);
  }
  return total;
}

bool FiniteMax(const float* s, size_t n, float* max) {
  const float lowest = -__builtin_inff();
  VecF best = Broadcast(lowest);
  VecI bad = {};
  size_t i = 0;
  const auto take = [&](VecF x) {
    best = Select(x > best, x, best);
    bad |= ((VecI)x & 0x7f800000) == 0x7f800000;
  };
  for (; i + kLanes <= n; i += kLanes) take(LoadFloats(s + i));
  if (i < n) {
    float tail[kLanes];
    for (size_t l = 0; l < kLanes; ++l) tail[l] = i + l < n ? s[i + l] : s[i];
    take(LoadFloats(tail));
  }
  float result = lowest;
  bool finite = true;
  for (size_t l = 0; l < kLanes; ++l) {
    if (best[l] > result) result = best[l];
    finite = finite && bad[l] == 0;
  }
  *max = result;
  return finite;
}

void Softcap(float* s, size_t n, float cap) {
  const float inverse = 1.0f / cap;
  ForEachVector(s, n, 0.0f, s, [&](VecF x) { return Tanh(x * inverse) * cap; });
}

void ToFloatAny(DType dtype, const std::byte* src, size_t n, float* dst) {
  switch (dtype) {
    case DType::kF32:
      __builtin_memcpy(dst, src, n * sizeof(float));
      break;
    case DType::kF16:
      ConvertVector<F16>(src, n, dst);
      break;
    case DType::kBf16:
      ConvertVector<Bf16>(src, n, dst);
      break;
  }
}

#undef PREFIXD_INLINE

}  // namespace

extern const KernelTable PREFIXD_TABLE;
const KernelTable PREFIXD_TABLE = {PREFIXD_TABLE_NAME, DotAny,    WeightedSumAny, CentredSumsAny,
                                   ExpShifted,         FiniteMax, Softcap,        ToFloatAny};

}  // namespace prefixd
