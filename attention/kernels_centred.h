// Sums of centred first and second powers, channel by channel.
// Part of kernels_body.h: included inside its namespace, once per instruction set.

constexpr size_t kCentredRows = 64;  // summed in float32

// kVecs * kLanes channels (or, with kTail, the last `columns` < kLanes) from channel `at` on:
// several vectors at a time, since each sum is one chain of dependent additions.
template <typename E, size_t kVecs, bool kTail>
PREFIXD_INLINE void CentredTile(const std::byte* const* x, size_t n, size_t at, size_t columns,
                                const float* centre, double* sum, double* sum_sq) {
  VecF mid[kVecs], first[kVecs], second[kVecs];
#pragma GCC unroll 4
  for (size_t c = 0; c < kVecs; ++c) {
    const std::byte* p = reinterpret_cast<const std::byte*>(centre + at + c * kLanes);
    mid[c] = kTail ? LoadTail<F32>(p, columns) : F32::Load(p);
    first[c] = second[c] = VecF{};
  }
  for (size_t i = 0; i < n; ++i) {
#pragma GCC unroll 4
    for (size_t c = 0; c < kVecs; ++c) {
      const std::byte* p = x[i] + (at + c * kLanes) * E::kBytes;
      const VecF d = (kTail ? LoadTail<E>(p, columns) : E::Load(p)) - mid[c];
      first[c] += d;
      second[c] += d * d;
    }
  }
#pragma GCC unroll 4
  for (size_t c = 0; c < kVecs; ++c) {
    AddToDouble(sum + at + c * kLanes, first[c], kTail ? columns : kLanes);
    AddToDouble(sum_sq + at + c * kLanes, second[c], kTail ? columns : kLanes);
  }
}

#if defined(PREFIXD_BF16_PAIRS)
// 32 bf16 channels from channel `at` on: two rows interleaved are pairs for the dot product, with
// ones and with themselves. The sums are of raw values, in float32: products of bf16 have 16 bits,
// so that 64 of them add up without rounding wherever they are alike enough to cancel later, when
// the centre is taken out in float64.
PREFIXD_INLINE void CentredPairs(const std::byte* const* x, size_t n, size_t at,
                                 const float* centre, double* sum, double* sum_sq) {
  typedef uint16_t Words __attribute__((vector_size(64)));
  const __m512bh ones = (__m512bh)(Words{} + (uint16_t)0x3f80);
  __m512 first[2] = {}, second[2] = {};
  for (size_t i = 0; i < n; i += 2) {
    Words a, b = {};
    __builtin_memcpy(&a, x[i] + at * 2, sizeof a);
    if (i + 1 < n) __builtin_memcpy(&b, x[i + 1] + at * 2, sizeof b);
    const __m512bh low = (__m512bh)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b);
    const __m512bh high = (__m512bh)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
    first[0] = _mm512_dpbf16_ps(first[0], low, ones);
    first[1] = _mm512_dpbf16_ps(first[1], high, ones);
    second[0] = _mm512_dpbf16_ps(second[0], low, low);
    second[1] = _mm512_dpbf16_ps(second[1], high, high);
  }
  // Unpacking works within 128 bits: channels 0-3, 8-11, 16-19, 24-27 in the low half.
  const auto in_order = [](const __m512* half, VecF* out) {
    const VecI from = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
    out[0] = __builtin_shuffle((VecF)half[0], (VecF)half[1], from);
    out[1] = __builtin_shuffle((VecF)half[0], (VecF)half[1], from + 8);
  };
  VecF s1[2], s2[2];
  in_order(first, s1);
  in_order(second, s2);
  const double rows = (double)n;
  for (size_t half = 0; half < 2; ++half) {
    const DoublePair wide1 = Widen(s1[half]), wide2 = Widen(s2[half]);
    const DoublePair mid = Widen(LoadFloats(centre + at + half * kLanes));
    const auto add = [&](VecD total, VecD squares, VecD c, size_t l) {
      StoreDoubles(sum + l, LoadDoubles(sum + l) + (total - rows * c));
      StoreDoubles(sum_sq + l, LoadDoubles(sum_sq + l) + (squares - 2 * c * total + rows * c * c));
    };
    add(wide1.low, wide2.low, mid.low, at + half * kLanes);
    add(wide1.high, wide2.high, mid.high, at + half * kLanes + kLanesD);
  }
}
#endif

template <typename E>
void CentredSums(const VectorBlock& x, const float* centre, double* sum, double* sum_sq) {
  for (size_t begin = 0; begin < x.n; begin += kCentredRows) {
    const size_t n = x.n - begin < kCentredRows ? x.n - begin : kCentredRows;
    const std::byte* rows[kCentredRows];
    for (size_t i = 0; i < n; ++i) rows[i] = VectorAt(x, begin + i);
    size_t l = 0;
#if defined(PREFIXD_BF16_PAIRS)
    if constexpr (E::kBytes == 2 && E::kIsBf16) {
      for (; l + 32 <= x.dim; l += 32) CentredPairs(rows, n, l, centre, sum, sum_sq);
    }
#endif
    for (; l + 4 * kLanes <= x.dim; l += 4 * kLanes) {
      CentredTile<E, 4, false>(rows, n, l, 0, centre, sum, sum_sq);
    }
    for (; l + kLanes <= x.dim; l += kLanes) {
      CentredTile<E, 1, false>(rows, n, l, 0, centre, sum, sum_sq);
    }
    if (l < x.dim) CentredTile<E, 1, true>(rows, n, l, x.dim - l, centre, sum, sum_sq);
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
