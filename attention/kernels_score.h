// Scores: dot products with the error of their rounding to float32 alone, however much the terms
// cancel. Products and sums are float64, in which a float32 or 16-bit element times a float32 one
// is exact.
// Part of kernels_body.h: included inside its namespace, once per instruction set.

constexpr size_t kScoreRows = 4;
// Rows that are held as float64 while all heads pass over them: they stay in the first-level cache.
constexpr size_t kScoreSlice = 8;

PREFIXD_INLINE void StoreAsDoubles(double* p, VecF v) {
  const DoublePair wide = Widen(v);
  StoreDoubles(p, wide.low);
  StoreDoubles(p + kLanesD, wide.high);
}

// dst: PadUp(dim) doubles, zeros behind the last element.
template <typename E>
PREFIXD_INLINE void WidenVector(const std::byte* src, size_t dim, double* dst) {
  size_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) StoreAsDoubles(dst + j, E::Load(src + j * E::kBytes));
  if (j < dim) {
    StoreAsDoubles(dst + j, LoadTail<E>(src + j * E::kBytes, dim - j));
    j += kLanes;
  }
  for (; j < PadUp(dim); ++j) dst[j] = 0;
}

PREFIXD_INLINE double SumLanesD(VecD v) {
  double sum = 0;
  for (size_t l = 0; l < kLanesD; ++l) sum += v[l];
  return sum;
}

// kHeads queries against kScoreRows widened rows.
template <size_t kHeads>
PREFIXD_INLINE void ScoreTile(const double* q, size_t ldq, const double* rows, size_t ld_rows,
                              double scale, size_t n, float* out, size_t ld_out) {
  VecD acc[kHeads][kScoreRows] = {};
  for (size_t j = 0; j < ldq; j += kLanesD) {
    VecD row[kScoreRows];
    for (size_t r = 0; r < kScoreRows; ++r) row[r] = LoadDoubles(rows + r * ld_rows + j);
    for (size_t g = 0; g < kHeads; ++g) {
      const VecD query = LoadDoubles(q + g * ldq + j);
      for (size_t r = 0; r < kScoreRows; ++r) acc[g][r] += query * row[r];
    }
  }
  for (size_t g = 0; g < kHeads; ++g) {
    for (size_t r = 0; r < n; ++r) {
      out[g * ld_out + r] = static_cast<float>(scale * SumLanesD(acc[g][r]));
    }
  }
}

template <typename E>
void Score(const double* q, size_t ldq, size_t heads, const VectorBlock& x, double scale,
           float* out, size_t ld_out) {
  constexpr size_t kHeads = kDotHeads;
  alignas(64) double rows[kScoreSlice * kMaxScoreDim];
  const size_t ld = PadUp(x.dim);
  for (size_t begin = 0; begin < x.n; begin += kScoreSlice) {
    const size_t n = x.n - begin < kScoreSlice ? x.n - begin : kScoreSlice;
    for (size_t i = 0; i < n; ++i) {
      PrefetchRow(x, begin + i + kAhead);
      WidenVector<E>(x.data + (begin + i) * x.stride, x.dim, rows + i * ld);
    }
    // A last tile of fewer rows computes stale ones along and leaves them out.
    for (size_t i = n; i < kScoreSlice && begin == 0; ++i) {
      __builtin_memset(rows + i * ld, 0, ld * sizeof(double));
    }
    for (size_t i = 0; i < n; i += kScoreRows) {
      const size_t tile = n - i < kScoreRows ? n - i : kScoreRows;
      float* tile_out = out + begin + i;
      size_t g = 0;
      for (; g + kHeads <= heads; g += kHeads) {
        ScoreTile<kHeads>(q + g * ldq, ldq, rows + i * ld, ld, scale, tile, tile_out + g * ld_out,
                          ld_out);
      }
      for (; g < heads; ++g) {
        ScoreTile<1>(q + g * ldq, ldq, rows + i * ld, ld, scale, tile, tile_out + g * ld_out,
                     ld_out);
      }
    }
  }
}

void ScoreAny(const double* q, size_t ldq, size_t heads, const VectorBlock& x, double scale,
              float* out, size_t ld_out) {
  switch (x.dtype) {
    case DType::kF32:
      Score<F32>(q, ldq, heads, x, scale, out, ld_out);
      break;
    case DType::kF16:
      Score<F16>(q, ldq, heads, x, scale, out, ld_out);
      break;
    case DType::kBf16:
      Score<Bf16>(q, ldq, heads, x, scale, out, ld_out);
      break;
  }
}
