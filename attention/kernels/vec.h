// Defines vectors of floats, and how elements of each dtype become them. Part of body.h: included
// inside its namespace, once per instruction set.

constexpr size_t kLanes = PREFIXD_LANES;
// Vectors between a prefetch and its use: rows are prefetched 14 ahead. With rows of 512 bytes 10,
// 14 and 18 read a tenth faster than 8, 12, 16 and 24.
constexpr size_t kPrefetch = 14;
constexpr size_t kConvertMax = 1024;  // widest vector that is converted ahead
constexpr size_t kDirectHeads = 8;    // with more heads vectors are converted ahead, once for all

typedef float VecF __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecI __attribute__((vector_size(kLanes * 4)));
typedef uint32_t VecU __attribute__((vector_size(kLanes * 4)));
typedef double VecD __attribute__((vector_size(kLanes * 4)));    // half as many lanes
typedef float VecHalf __attribute__((vector_size(kLanes * 2)));  // its floats
typedef uint16_t VecH __attribute__((vector_size(kLanes * 2)));

// x - 0 is x, of either sign of zero: no instruction.
PREFIXD_INLINE VecF Broadcast(float x) { return x - VecF{}; }
PREFIXD_INLINE VecF LoadFloats(const float* p) {
  VecF v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
PREFIXD_INLINE void StoreFloats(float* p, VecF v) { __builtin_memcpy(p, &v, sizeof v); }

constexpr size_t kLanesD = kLanes / 2;

PREFIXD_INLINE VecD LoadDoubles(const double* p) {
  VecD v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
PREFIXD_INLINE void StoreDoubles(double* p, VecD v) { __builtin_memcpy(p, &v, sizeof v); }

struct DoublePair {
  VecD low, high;
};
PREFIXD_INLINE DoublePair Widen(VecF v) {
#if PREFIXD_LANES == 16
  const __m512i bits = (__m512i)v;
  return {
      (VecD)_mm512_maskz_cvtps_pd(0xff, (__m256)_mm512_maskz_extracti32x8_epi32(0xff, bits, 0)),
      (VecD)_mm512_maskz_cvtps_pd(0xff, (__m256)_mm512_maskz_extracti32x8_epi32(0xff, bits, 1))};
#elif PREFIXD_LANES == 8
  return {(VecD)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)v)),
          (VecD)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)v, 1))};
#else
  VecHalf half[2];
  __builtin_memcpy(half, &v, sizeof v);
  return {__builtin_convertvector(half[0], VecD), __builtin_convertvector(half[1], VecD)};
#endif
}

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

// Returns the sums over the lanes of four vectors.
PREFIXD_INLINE Vec4 SumFour(VecF va, VecF vb, VecF vc, VecF vd) {
  const Vec4 a = FoldToFour(va), b = FoldToFour(vb), c = FoldToFour(vc), d = FoldToFour(vd);
  const Vec4 ab =
      __builtin_shufflevector(a, b, 0, 4, 2, 6) + __builtin_shufflevector(a, b, 1, 5, 3, 7);
  const Vec4 cd =
      __builtin_shufflevector(c, d, 0, 4, 2, 6) + __builtin_shufflevector(c, d, 1, 5, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

#if PREFIXD_LANES > 4
typedef double Vec4D __attribute__((vector_size(32)));
PREFIXD_INLINE Vec4D FoldToFour(VecD v) {
#if PREFIXD_LANES == 16
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
#else
  return v;
#endif
}
#endif

// Returns the sums over the lanes of four vectors, times scale.
PREFIXD_INLINE Vec4 ScaledSums(VecD va, VecD vb, VecD vc, VecD vd, double scale) {
#if PREFIXD_LANES == 4
  return Vec4{(float)(scale * (va[0] + va[1])), (float)(scale * (vb[0] + vb[1])),
              (float)(scale * (vc[0] + vc[1])), (float)(scale * (vd[0] + vd[1]))};
#else
  const Vec4D a = FoldToFour(va), b = FoldToFour(vb), c = FoldToFour(vc), d = FoldToFour(vd);
  const Vec4D ab =
      __builtin_shufflevector(a, b, 0, 4, 2, 6) + __builtin_shufflevector(a, b, 1, 5, 3, 7);
  const Vec4D cd =
      __builtin_shufflevector(c, d, 0, 4, 2, 6) + __builtin_shufflevector(c, d, 1, 5, 3, 7);
  const Vec4D sums =
      __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
  return __builtin_convertvector(scale * sums, Vec4);
#endif
}

PREFIXD_INLINE float SumLanes(VecF v) { return SumFour(v, v, v, v)[0]; }

#if PREFIXD_LANES == 16
// Returns the sums over the lanes of eight vectors, times scale.
typedef float Vec8 __attribute__((vector_size(32)));
PREFIXD_INLINE Vec8 ScaledSumsOfEight(const VecD* v, double scale) {
  VecD pair[4];  // lanes 2i, 2i + 1: sums of lanes 2i, 2i + 1 of vectors 2p and 2p + 1
#pragma GCC unroll 4
  for (size_t p = 0; p < 4; ++p) {
    const VecD a = v[2 * p], b = v[2 * p + 1];
    pair[p] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
              __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
  }
  const auto halve = [](VecD a, VecD b) {
    return __builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13) +
           __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15);
  };
  const VecD sums = halve(halve(pair[0], pair[1]), halve(pair[2], pair[3]));
  return __builtin_convertvector(scale * sums, Vec8);
}
#endif

// 2 * kLanes elements: the even ones and the odd ones.
struct FloatPair {
  VecF even, odd;
};

// Convert between a pair and the elements in order.
PREFIXD_INLINE void InOrder(FloatPair p, VecF out[2]) {
#if PREFIXD_LANES == 16
  out[0] = __builtin_shufflevector(p.even, p.odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
                                   7, 23);
  out[1] = __builtin_shufflevector(p.even, p.odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                   30, 15, 31);
#elif PREFIXD_LANES == 8
  out[0] = __builtin_shufflevector(p.even, p.odd, 0, 8, 1, 9, 2, 10, 3, 11);
  out[1] = __builtin_shufflevector(p.even, p.odd, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  out[0] = __builtin_shufflevector(p.even, p.odd, 0, 4, 1, 5);
  out[1] = __builtin_shufflevector(p.even, p.odd, 2, 6, 3, 7);
#endif
}
PREFIXD_INLINE FloatPair Apart(const float* p) {
  const VecF a = LoadFloats(p), b = LoadFloats(p + kLanes);
#if PREFIXD_LANES == 16
  return {__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
          __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
#elif PREFIXD_LANES == 8
  return {__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14),
          __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)};
#else
  return {__builtin_shufflevector(a, b, 0, 2, 4, 6), __builtin_shufflevector(a, b, 1, 3, 5, 7)};
#endif
}

// 2 * kLanesD doubles: the even ones, and the odd ones.
PREFIXD_INLINE DoublePair Apart(const double* p) {
  const VecD a = LoadDoubles(p), b = LoadDoubles(p + kLanesD);
#if PREFIXD_LANES == 16
  return {__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14),
          __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15)};
#elif PREFIXD_LANES == 8
  return {__builtin_shufflevector(a, b, 0, 2, 4, 6), __builtin_shufflevector(a, b, 1, 3, 5, 7)};
#else
  return {__builtin_shufflevector(a, b, 0, 2), __builtin_shufflevector(a, b, 1, 3)};
#endif
}

// Element types: how kLanes consecutive elements become floats. With kPairs, LoadPair loads twice
// as many more cheaply, the even ones apart from the odd ones.
struct F32 {
  static constexpr bool kPairs = false;
  static constexpr size_t kBytes = 4;
  static constexpr bool kIsBf16 = false;
  static PREFIXD_INLINE VecF Load(const std::byte* p) {
    VecF v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
  }
};
struct Bf16 {
  static constexpr bool kPairs = true;
  static constexpr size_t kBytes = 2;
  // Either half of a 32-bit word is one float: the lower is moved up, the upper stays.
  static PREFIXD_INLINE FloatPair LoadPair(const std::byte* p) {
    VecU words;
    __builtin_memcpy(&words, p, sizeof words);
    return {(VecF)(words << 16), (VecF)(words & 0xffff0000u)};
  }
  static constexpr bool kIsBf16 = true;
  static PREFIXD_INLINE VecF Load(const std::byte* p) {
    VecH h;
    __builtin_memcpy(&h, p, sizeof h);
#if PREFIXD_LANES == 16
    // This intrinsic is one instruction where GCC 12 makes several of __builtin_convertvector. The
    // unmasked intrinsics trip -Wuninitialized inside its own header.
    const VecU wide = (VecU)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h);
#elif PREFIXD_LANES == 8
    const VecU wide = (VecU)_mm256_cvtepu16_epi32((__m128i)h);
#else
    const VecU wide = __builtin_convertvector(h, VecU);
#endif
    return (VecF)(wide << 16);
  }
};
struct F16 {
  static constexpr bool kPairs = false;
  static constexpr size_t kBytes = 2;
  static constexpr bool kIsBf16 = false;
  static PREFIXD_INLINE VecF Load(const std::byte* p) {
    VecH h;
    __builtin_memcpy(&h, p, sizeof h);
#if defined(__F16C__) && PREFIXD_LANES == 16
    return (VecF)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h);
#elif defined(__F16C__) && PREFIXD_LANES == 8
    return (VecF)_mm256_cvtph_ps((__m128i)h);
#else
    const VecU bits = __builtin_convertvector(h, VecU);
    // Exponent and mantissa move into place, then a factor of 2^112 corrects the bias; this handles
    // subnormals. Infinity and NaN get the float's all-ones exponent.
    const VecF magnitude = (VecF)((bits & 0x7fffu) << 13) * Broadcast(0x1p112f);
    const VecU special = (VecU)((bits & 0x7c00u) == 0x7c00u) & 0x7f800000u;
    return (VecF)((VecU)magnitude | special | ((bits & 0x8000u) << 16));
#endif
  }
};

// Loads the last `n` < kLanes elements, with zeros behind them.
template <typename E>
PREFIXD_INLINE VecF LoadTail(const std::byte* p, size_t n) {
  alignas(64) std::byte padded[kLanes * E::kBytes] = {};
  __builtin_memcpy(padded, p, n * E::kBytes);
  return E::Load(padded);
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

PREFIXD_INLINE const std::byte* VectorAt(const VectorBlock& x, size_t i) {
  if (x.refs == nullptr) return x.data + i * x.stride;
  return x.of_values ? x.refs[i].value : x.refs[i].key;
}

PREFIXD_INLINE bool Scattered(const VectorBlock& x) { return x.refs != nullptr && !x.in_runs; }

// How rows come into the caches: a loop of its own loads scattered rows before a block of them is
// used. Each of them lies in another page, and while the address of a page is looked up the
// processor gets only as far as its window of instructions reaches; a prefetch, too, ends only when
// its address is known. So the loop spends few instructions a row, and touches nothing but memory.
// Rows in order share pages, and hardware prefetchers see most of them coming. The rest, gapped and
// interleaved as the rows of a tile are, is prefetched line by line while other rows are used (a
// burst of whole rows would wait for the memory and then leave it idle). The scattered keys of a
// short list (dot.h) are prefetched this way, too: float32 computes with them in a third of the
// time, several fit the window, and their search takes a tenth less time than with a loop of loads.

PREFIXD_INLINE void Prefetch(const std::byte* p, size_t bytes) {
  for (size_t line = 0; line < bytes; line += 64) __builtin_prefetch(p + line, 0, 2);
  if ((uintptr_t)p % 64 != 0 && bytes > 0) __builtin_prefetch(p + bytes - 1, 0, 2);
}

// Brings scattered vector i into the first-level cache: prefetches one line 64 rows ahead (for the
// sake of its address) and whole rows 32 ahead into the second-level cache, and reads each line
// that is used now.
PREFIXD_INLINE void BringOne(const VectorBlock& x, size_t i) {
  constexpr size_t kFar = 64, kNear = 32;
  if (i + kFar < x.ahead && !x.of_values) __builtin_prefetch(x.refs[i + kFar].key, 0, 2);
  if (i + kNear < x.ahead) {
    if (!x.of_values) Prefetch(x.refs[i + kNear].key, x.ahead_key_bytes);
    Prefetch(x.refs[i + kNear].value, x.ahead_value_bytes);
  }
  const size_t bytes = x.of_values ? x.ahead_value_bytes : x.ahead_key_bytes;
  const std::byte* p = VectorAt(x, i);
  for (size_t line = 0; line < bytes; line += 64) {
    static_cast<void>(*reinterpret_cast<const volatile std::byte*>(p + line));
  }
  if ((uintptr_t)p % 64 != 0 && bytes > 0) {
    static_cast<void>(*reinterpret_cast<const volatile std::byte*>(p + bytes - 1));
  }
}

// Brings vectors [begin, end), if they are scattered.
PREFIXD_INLINE void Bring(const VectorBlock& x, size_t begin, size_t end) {
  if (x.ahead == 0 || !Scattered(x)) return;
  for (size_t i = begin; i < end; ++i) BringOne(x, i);
}

// Prefetches the whole of row i, for rows in order.
PREFIXD_INLINE void PrefetchRow(const VectorBlock& x, size_t i) {
  if (Scattered(x) || i >= x.ahead) return;
  if (x.refs == nullptr) {
    Prefetch(x.data + i * x.stride, x.ahead_key_bytes + x.ahead_value_bytes);
    return;
  }
  Prefetch(x.refs[i].key, x.ahead_key_bytes);
  Prefetch(x.refs[i].value, x.ahead_value_bytes);
}

// A row to prefetch line by line, while a pass over keys reads another row. In a pass over keys the
// values are for a later pass, which reads them from the second-level cache.
struct AheadRow {
  const std::byte* key;
  const std::byte* value;
  size_t key_bytes, value_bytes;
};
// Returns row i, or the last row for i behind it. REQUIRES: x.ahead > 0.
PREFIXD_INLINE AheadRow RowAhead(const VectorBlock& x, size_t i) {
  if (i >= x.ahead) i = x.ahead - 1;
  const std::byte* key = x.refs ? x.refs[i].key : x.data + i * x.stride;
  return {key, x.refs ? x.refs[i].value : key + x.ahead_key_bytes, x.ahead_key_bytes,
          x.ahead_value_bytes};
}
// Puts rows [i + kPrefetch, i + kPrefetch + kRows) into `ahead`; false if there is nothing to
// prefetch.
template <size_t kRows>
PREFIXD_INLINE bool Prefetcher(const VectorBlock& x, size_t i, AheadRow* ahead) {
  if (i + kPrefetch >= x.ahead) return false;
  for (size_t r = 0; r < kRows; ++r) ahead[r] = RowAhead(x, i + r + kPrefetch);
  return true;
}
PREFIXD_INLINE void PrefetchLine(const AheadRow& row, size_t at) {
  if (at < row.key_bytes) __builtin_prefetch(row.key + at);
  if (at < row.value_bytes) __builtin_prefetch(row.value + at, 0, 2);
}

void ToFloatAny(DType dtype, const std::byte* src, size_t n, float* dst) {
  switch (dtype) {
    case DType::kF32:
      if (n > 0) __builtin_memcpy(dst, src, n * sizeof(float));
      break;
    case DType::kF16:
      ConvertVector<F16>(src, n, dst);
      break;
    case DType::kBf16:
      ConvertVector<Bf16>(src, n, dst);
      break;
  }
}
