// Computes scores: dot products whose only error is their rounding to float32, however much the
// terms cancel. Products and sums are float64, in which the product of two float32 is exact. Part
// of body.h: included inside its namespace, once per instruction set.

// Rows that were converted ahead.
struct F64 {
  static constexpr size_t kBytes = 8;
  static constexpr bool kPairs = false;
};
// Rows with so many columns that splitting queries into even and odd columns does not pay off.
struct Bf16InOrder : Bf16 {
  static constexpr bool kPairs = false;
};
constexpr size_t kPairColumns = 256;

// Loads kLanesD consecutive elements as doubles.
template <typename E>
PREFIXD_INLINE VecD LoadWide(const std::byte* p) {
  if constexpr (E::kBytes == 8) {
    return LoadDoubles(reinterpret_cast<const double*>(p));
  } else {
#if PREFIXD_LANES == 16
    __m256 floats;
    if constexpr (E::kBytes == 4) {
      __builtin_memcpy(&floats, p, sizeof floats);
    } else {
      __m128i halves;
      __builtin_memcpy(&halves, p, sizeof halves);
      if constexpr (E::kIsBf16) {
        floats = (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16);
      } else {
        floats = _mm256_cvtph_ps(halves);
      }
    }
    return (VecD)_mm512_maskz_cvtps_pd(0xff, floats);
#elif PREFIXD_LANES == 8
    __m128 floats;
    if constexpr (E::kBytes == 4) {
      __builtin_memcpy(&floats, p, sizeof floats);
    } else {
      const __m128i halves = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
      if constexpr (E::kIsBf16) {
        floats = (__m128)_mm_slli_epi32(_mm_cvtepu16_epi32(halves), 16);
      } else {
        floats = _mm_cvtph_ps(halves);
      }
    }
    return (VecD)_mm256_cvtps_pd(floats);
#else
    return Widen(LoadTail<E>(p, kLanesD)).low;
#endif
  }
}

template <typename E>
PREFIXD_INLINE VecD LoadWideTail(const std::byte* p, size_t n) {
  alignas(64) std::byte padded[kLanesD * E::kBytes] = {};
  __builtin_memcpy(padded, p, n * E::kBytes);
  return LoadWide<E>(padded);
}

// Rows per tile of four heads. Their sums are chains of dependent additions: 8 chains just keep two
// units busy that take 4 cycles each; 16 do so with room to spare (32 registers with AVX-512).
constexpr size_t kScoreRows = kLanes == 16 ? 4 : 2;

// Prefetches kRows rows line by line while as many others are used; j is the next column, of
// elements of kBytes.
template <size_t kRows, size_t kBytes>
PREFIXD_INLINE void AskAt(const AheadRow* ahead, size_t j) {
  constexpr size_t kStep = kLanesD * kBytes * kRows, kLines = kStep < 64 ? 1 : kStep / 64;
  if (ahead == nullptr || j * kBytes * kRows % 64 != 0) return;
#pragma GCC unroll 4
  for (size_t l = 0; l < kLines; ++l) {
    const size_t line = j * kBytes * kRows / 64 + l;
    PrefetchLine(ahead[line % kRows], line / kRows * 64);
  }
}

// Prefetches the lines that columns [0, j) left: the ends of keys that fill no line, and of longer
// values.
template <size_t kRows, size_t kBytes>
PREFIXD_INLINE void AskRest(const AheadRow* ahead, size_t j) {
  if (ahead == nullptr) return;
  const size_t most =
      ahead[0].key_bytes > ahead[0].value_bytes ? ahead[0].key_bytes : ahead[0].value_bytes;
  for (size_t line = (j * kBytes * kRows + 63) / 64; line < (most + 63) / 64 * kRows; ++line) {
    PrefetchLine(ahead[line % kRows], line / kRows * 64);
  }
}

// Scores kHeads queries against kRows vectors, and stores the first n (the others must be
// readable). `ahead`: rows to prefetch meanwhile, or null. Where E comes in pairs, q has each 2 *
// kLanes columns apart, the even ones first.
template <typename E, size_t kHeads, size_t kRows>
PREFIXD_INLINE void ScoreTile(const double* q, size_t ldq, const std::byte* const* x, size_t dim,
                              double scale, size_t n, float* out, size_t ld_out,
                              const AheadRow* ahead) {
  constexpr size_t kSums = kHeads * kRows;
  static_assert(kSums % 4 == 0);
  VecD acc[kSums];
#pragma GCC unroll 16
  for (size_t i = 0; i < kSums; ++i) acc[i] = VecD{};
  const auto multiply = [&](const VecD* row, size_t j) {
#pragma GCC unroll 4
    for (size_t g = 0; g < kHeads; ++g) {
      const VecD query = LoadDoubles(q + g * ldq + j);
#pragma GCC unroll 4
      for (size_t r = 0; r < kRows; ++r) acc[g * kRows + r] += query * row[r];
    }
  };
  size_t j = 0;
  if constexpr (E::kPairs) {
    // Goes through memory, because loads widen what would take shuffles in registers.
    alignas(64) float wide[kRows][kPairColumns];
    const size_t paired = dim / (2 * kLanes) * (2 * kLanes);
    for (size_t c = 0; c < paired; c += 2 * kLanes) {
#pragma GCC unroll 4
      for (size_t r = 0; r < kRows; ++r) {
        const FloatPair pair = E::LoadPair(x[r] + c * E::kBytes);
        StoreFloats(wide[r] + c, pair.even);
        StoreFloats(wide[r] + c + kLanes, pair.odd);
      }
    }
    for (; j < paired; j += kLanesD) {
      AskAt<kRows, E::kBytes>(ahead, j);
      VecD row[kRows];
#pragma GCC unroll 4
      for (size_t r = 0; r < kRows; ++r) {
        row[r] = LoadWide<F32>(reinterpret_cast<const std::byte*>(wide[r] + j));
      }
      multiply(row, j);
    }
  }
  for (; j + kLanesD <= dim; j += kLanesD) {
    AskAt<kRows, E::kBytes>(ahead, j);
    VecD row[kRows];
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) row[r] = LoadWide<E>(x[r] + j * E::kBytes);
    multiply(row, j);
  }
  AskRest<kRows, E::kBytes>(ahead, j);
  if (j < dim) {
    VecD row[kRows];
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) row[r] = LoadWideTail<E>(x[r] + j * E::kBytes, dim - j);
    multiply(row, j);
  }
  float sums[kSums];
#if PREFIXD_LANES == 16
  if constexpr (kSums % 8 == 0) {
#pragma GCC unroll 4
    for (size_t i = 0; i < kSums; i += 8) {
      const Vec8 eight = ScaledSumsOfEight(acc + i, scale);
      __builtin_memcpy(sums + i, &eight, sizeof eight);
    }
  } else
#endif
  {
#pragma GCC unroll 4
    for (size_t i = 0; i < kSums; i += 4) {
      const Vec4 four = ScaledSums(acc[i], acc[i + 1], acc[i + 2], acc[i + 3], scale);
      __builtin_memcpy(sums + i, &four, sizeof four);
    }
  }
  for (size_t g = 0; g < kHeads; ++g) {
    if (n == kRows) {
      __builtin_memcpy(out + g * ld_out, sums + g * kRows, kRows * sizeof(float));
    } else {
      for (size_t r = 0; r < n; ++r) out[g * ld_out + r] = sums[g * kRows + r];
    }
  }
}

// Scores kHeads queries against the vectors [begin, end).
template <typename E, size_t kHeads, size_t kRows>
PREFIXD_INLINE void ScoreHeads(const double* q, size_t ldq, const VectorBlock& x, size_t begin,
                               size_t end, double scale, float* out, size_t ld_out, bool first) {
  for (size_t i = begin; i < end; i += kRows) {
    AheadRow ahead[kRows];
    const bool ask = first && !Scattered(x) && Prefetcher<kRows>(x, i, ahead);
    const size_t n = end - i < kRows ? end - i : kRows;
    const std::byte* rows[kRows];
    for (size_t r = 0; r < kRows; ++r) rows[r] = VectorAt(x, i + (r < n ? r : 0));
    ScoreTile<E, kHeads, kRows>(q, ldq, rows, x.dim, scale, n, out + i, ld_out,
                                ask ? ahead : nullptr);
  }
}

// Scores all heads against the vectors [begin, end), which stay in the first-level cache.
template <typename E>
PREFIXD_INLINE void ScoreSlice(const double* q, size_t ldq, size_t heads, const VectorBlock& x,
                               size_t begin, size_t end, double scale, float* out, size_t ld_out) {
  size_t g = 0;
  for (; g + 4 <= heads; g += 4) {
    ScoreHeads<E, 4, kScoreRows>(q + g * ldq, ldq, x, begin, end, scale, out + g * ld_out, ld_out,
                                 g == 0);
  }
  if (g + 2 <= heads) {
    ScoreHeads<E, 2, 4>(q + g * ldq, ldq, x, begin, end, scale, out + g * ld_out, ld_out, g == 0);
    g += 2;
  }
  if (g < heads) {
    ScoreHeads<E, 1, 4>(q + g * ldq, ldq, x, begin, end, scale, out + g * ld_out, ld_out, g == 0);
  }
}

// sums: null, or receives centred sums. Scattered rows are summed while they come in and, where E
// comes in pairs, widened for the scores too; rows in order, which are prefetched between the
// scores' multiplications, are summed after these.
template <typename E>
void ScoreDirect(const double* q, size_t ldq, size_t heads, const VectorBlock& x, double scale,
                 float* out, size_t ld_out, const CentredTo* sums) {
  alignas(64) float wide[E::kPairs ? kCentredRows * kPairColumns : 1];
  const bool scattered = Scattered(x), widen = E::kPairs && x.dim % (2 * kLanes) == 0;
  for (size_t begin = 0; begin < x.n; begin += kCentredRows) {
    const size_t end = x.n - begin < kCentredRows ? x.n : begin + kCentredRows;
    if (sums == nullptr) {
      Bring(x, begin, end);
    } else if (scattered) {
      CentredSliceBrought<E>(x, begin, end, *sums, widen ? wide : nullptr);
      if (widen) {
        const VectorBlock rows = {reinterpret_cast<const std::byte*>(wide), x.dim * sizeof(float),
                                  end - begin, x.dim};
        ScoreSlice<F32>(q, ldq, heads, rows, 0, rows.n, scale, out + begin, ld_out);
        continue;
      }
    }
    ScoreSlice<E>(q, ldq, heads, x, begin, end, scale, out, ld_out);
    if (sums != nullptr && !scattered) CentredSlice<E>(x, begin, end, *sums);
  }
}

// Lays queries out with each 2 * kLanes columns apart, the even ones first.
template <typename E>
void ScorePairs(const double* q, size_t ldq, size_t heads, const VectorBlock& x, double scale,
                float* out, size_t ld_out, const CentredTo* sums) {
  alignas(64) double apart[kDirectHeads * kPairColumns];
  const size_t columns = PadUp(x.dim), paired = x.dim / (2 * kLanes) * (2 * kLanes);
  for (size_t g = 0; g < heads; ++g) {
    const double* from = q + g * ldq;
    double* to = apart + g * columns;
    size_t c = 0;
    for (; c < paired; c += 2 * kLanes) {
#pragma GCC unroll 2
      for (size_t half = 0; half < 2; ++half) {
        const DoublePair pair = Apart(from + c + half * kLanes);
        StoreDoubles(to + c + half * kLanesD, pair.low);
        StoreDoubles(to + c + kLanes + half * kLanesD, pair.high);
      }
    }
    for (; c < columns; ++c) to[c] = from[c];
  }
  ScoreDirect<E>(apart, columns, heads, x, scale, out, ld_out, sums);
}

// With many heads vectors are converted once instead of once per tile of heads. sums: null, or
// receives centred sums.
template <typename E>
void Score(const double* q, size_t ldq, size_t heads, const VectorBlock& x, double scale,
           float* out, size_t ld_out, const CentredTo* sums) {
  if (heads <= kDirectHeads || x.dim > kConvertMax) {
    if constexpr (!E::kPairs) {
      ScoreDirect<E>(q, ldq, heads, x, scale, out, ld_out, sums);
    } else if (heads <= kDirectHeads && x.dim <= kPairColumns) {
      ScorePairs<E>(q, ldq, heads, x, scale, out, ld_out, sums);
    } else {
      ScoreDirect<Bf16InOrder>(q, ldq, heads, x, scale, out, ld_out, sums);
    }
    return;
  }
  constexpr size_t kSlice = 8;
  alignas(64) double wide[kSlice * kConvertMax];
  for (size_t begin = 0; begin < x.n; begin += kSlice) {
    const size_t n = x.n - begin < kSlice ? x.n - begin : kSlice;
    Bring(x, begin, begin + n);
    for (size_t i = 0; i < n; ++i) {
      PrefetchRow(x, begin + i + kPrefetch);
      const std::byte* row = VectorAt(x, begin + i);
      double* out_row = wide + i * x.dim;
      size_t j = 0;
      for (; j + kLanesD <= x.dim; j += kLanesD) {
        StoreDoubles(out_row + j, LoadWide<E>(row + j * E::kBytes));
      }
      if (j < x.dim) {
        double tail[kLanesD];
        StoreDoubles(tail, LoadWideTail<E>(row + j * E::kBytes, x.dim - j));
        __builtin_memcpy(out_row + j, tail, (x.dim - j) * sizeof(double));
      }
    }
    const VectorBlock slice = {reinterpret_cast<const std::byte*>(wide), x.dim * sizeof(double), n,
                               x.dim};
    ScoreSlice<F64>(q, ldq, heads, slice, 0, n, scale, out + begin, ld_out);
    // Runs have as many rows as elsewhere, so the sums are the same to the bit.
    const size_t end = begin + n, run = begin / kCentredRows * kCentredRows;
    if (sums != nullptr && (end == x.n || end - run == kCentredRows)) {
      CentredSlice<E>(x, run, end, *sums);
    }
  }
}

void ScoreRows(const double* q, size_t ldq, size_t heads, const VectorBlock& x, double scale,
               float* out, size_t ld_out, const CentredTo* sums) {
  switch (x.dtype) {
    case DType::kF32:
      Score<F32>(q, ldq, heads, x, scale, out, ld_out, sums);
      break;
    case DType::kF16:
      Score<F16>(q, ldq, heads, x, scale, out, ld_out, sums);
      break;
    case DType::kBf16:
      Score<Bf16>(q, ldq, heads, x, scale, out, ld_out, sums);
      break;
  }
}

void ScoreAny(const double* q, size_t ldq, size_t heads, const VectorBlock& x, double scale,
              float* out, size_t ld_out) {
  ScoreRows(q, ldq, heads, x, scale, out, ld_out, nullptr);
}

void ScoreAndSumsAny(const double* q, size_t ldq, size_t heads, const VectorBlock& x, double scale,
                     float* out, size_t ld_out, const float* centre, double* sum, double* sum_sq) {
  const CentredTo sums = {centre, sum, sum_sq};
  ScoreRows(q, ldq, heads, x, scale, out, ld_out, &sums);
}
