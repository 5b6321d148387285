// Computes sums over vectors: weighted sums, and sums of centred first and second powers. Part of
// body.h: included inside its namespace, once per instruction set.

constexpr size_t kRun = 8;       // vectors summed in float32 by themselves
constexpr size_t kSumRows = 64;  // vectors whose run sums are added up in float32
// Columns of accumulators that four heads keep in registers (32 with AVX-512, else 16).
constexpr size_t kSumVecs = kLanes == 16 ? 4 : 2;

PREFIXD_INLINE void AddToDouble(double* acc, VecF v, size_t n) {
  if (n == kLanes) {
    const DoublePair wide = Widen(v);
    StoreDoubles(acc, LoadDoubles(acc) + wide.low);
    StoreDoubles(acc + kLanesD, LoadDoubles(acc + kLanesD) + wide.high);
    return;
  }
  float lane[kLanes];
  StoreFloats(lane, v);
  for (size_t l = 0; l < n; ++l) acc[l] += static_cast<double>(lane[l]);
}

// Loads kVecs * kLanes elements (or, with kTail, the last `columns` < kLanes) as floats. Where E
// comes in pairs and there are two vectors at least, even elements are apart from odd ones.
template <typename E, size_t kVecs, bool kTail>
PREFIXD_INLINE void LoadVecs(const std::byte* p, size_t columns, VecF* out) {
  if constexpr (E::kPairs && kVecs % 2 == 0) {
#pragma GCC unroll 4
    for (size_t c = 0; c < kVecs; c += 2) {
      const FloatPair pair = E::LoadPair(p + c * kLanes * E::kBytes);
      out[c] = pair.even;
      out[c + 1] = pair.odd;
    }
  } else {
#pragma GCC unroll 4
    for (size_t c = 0; c < kVecs; ++c) {
      out[c] = kTail ? LoadTail<E>(p, columns) : E::Load(p + c * kLanes * E::kBytes);
    }
  }
}

// Adds sums over vectors that LoadVecs loaded to columns in their order.
template <typename E, size_t kVecs, bool kTail>
PREFIXD_INLINE void AddVecs(double* acc, const VecF* sums, size_t columns) {
#pragma GCC unroll 4
  for (size_t c = 0; c < kVecs; ++c) {
    VecF ordered[2] = {sums[c]};
    if constexpr (E::kPairs && kVecs % 2 == 0) {
      InOrder({sums[c], sums[c + 1]}, ordered);
      AddToDouble(acc + c++ * kLanes, ordered[0], kLanes);
      AddToDouble(acc + c * kLanes, ordered[1], kLanes);
    } else {
      AddToDouble(acc + c * kLanes, ordered[0], kTail ? columns : kLanes);
    }
  }
}

// Sums kHeads weight rows over kVecs * kLanes columns (or, with kTail, the last `columns` < kLanes)
// of the n <= kSumRows vectors x, from element `at` on.
template <typename E, size_t kHeads, size_t kVecs, bool kTail>
PREFIXD_INLINE void WeightedTile(const float* w, size_t ldw, const std::byte* const* x, size_t n,
                                 size_t at, size_t columns, double* acc, size_t ld_acc) {
  VecF total[kHeads][kVecs];
#pragma GCC unroll 4
  for (size_t g = 0; g < kHeads; ++g) {
#pragma GCC unroll 4
    for (size_t c = 0; c < kVecs; ++c) total[g][c] = VecF{};
  }
  for (size_t begin = 0; begin < n; begin += kRun) {
    const size_t end = n - begin < kRun ? n : begin + kRun;
    VecF sum[kHeads][kVecs];
#pragma GCC unroll 4
    for (size_t g = 0; g < kHeads; ++g) {
#pragma GCC unroll 4
      for (size_t c = 0; c < kVecs; ++c) sum[g][c] = VecF{};
    }
    for (size_t i = begin; i < end; ++i) {
      VecF row[kVecs];
      LoadVecs<E, kVecs, kTail>(x[i] + at * E::kBytes, columns, row);
#pragma GCC unroll 4
      for (size_t g = 0; g < kHeads; ++g) {
        const VecF weight = Broadcast(w[g * ldw + i]);
#pragma GCC unroll 4
        for (size_t c = 0; c < kVecs; ++c) sum[g][c] += weight * row[c];
      }
    }
#pragma GCC unroll 4
    for (size_t g = 0; g < kHeads; ++g) {
#pragma GCC unroll 4
      for (size_t c = 0; c < kVecs; ++c) total[g][c] += sum[g][c];
    }
  }
#pragma GCC unroll 4
  for (size_t g = 0; g < kHeads; ++g) {
    AddVecs<E, kVecs, kTail>(acc + g * ld_acc + at, total[g], columns);
  }
}

template <typename E, size_t kHeads>
void WeightedHeads(const float* w, size_t ldw, const std::byte* const* x, size_t n, size_t dim,
                   double* acc, size_t ld_acc) {
  size_t l = 0;
  for (; l + kSumVecs * kLanes <= dim; l += kSumVecs * kLanes) {
    WeightedTile<E, kHeads, kSumVecs, false>(w, ldw, x, n, l, 0, acc, ld_acc);
  }
  for (; l + kLanes <= dim; l += kLanes) {
    WeightedTile<E, kHeads, 1, false>(w, ldw, x, n, l, 0, acc, ld_acc);
  }
  if (l < dim) WeightedTile<E, kHeads, 1, true>(w, ldw, x, n, l, dim - l, acc, ld_acc);
}

template <typename E>
void WeightedSum(const float* w, size_t ldw, size_t heads, const VectorBlock& x, double* acc,
                 size_t ld_acc) {
  for (size_t begin = 0; begin < x.n; begin += kSumRows) {
    const size_t n = x.n - begin < kSumRows ? x.n - begin : kSumRows;
    Bring(x, begin, begin + n);
    const std::byte* rows[kSumRows];
    for (size_t i = 0; i < n; ++i) rows[i] = VectorAt(x, begin + i);
    const float* weights = w + begin;
    size_t g = 0;
    for (; g + 4 <= heads; g += 4) {
      WeightedHeads<E, 4>(weights + g * ldw, ldw, rows, n, x.dim, acc + g * ld_acc, ld_acc);
    }
    weights += g * ldw;
    double* rest = acc + g * ld_acc;
    switch (heads - g) {
      case 1:
        WeightedHeads<E, 1>(weights, ldw, rows, n, x.dim, rest, ld_acc);
        break;
      case 2:
        WeightedHeads<E, 2>(weights, ldw, rows, n, x.dim, rest, ld_acc);
        break;
      case 3:
        WeightedHeads<E, 3>(weights, ldw, rows, n, x.dim, rest, ld_acc);
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

// Combines kVecs * kLanesD columns from `rows` on. Every kChains-th row enters a sum of its own,
// since each sum is one chain of dependent additions.
template <size_t kVecs, size_t kChains>
PREFIXD_INLINE void CombineTile(const double* w, size_t n, const double* rows, size_t columns,
                                double* out) {
  VecD sum[kChains][kVecs];
  for (size_t k = 0; k < kChains; ++k) {
    for (size_t c = 0; c < kVecs; ++c) sum[k][c] = VecD{};
  }
  const auto add = [&](size_t i, VecD* to) {
    const VecD weight = w[i] - VecD{};
    for (size_t c = 0; c < kVecs; ++c) {
      to[c] += weight * LoadDoubles(rows + i * columns + c * kLanesD);
    }
  };
  size_t i = 0;
  for (; i + kChains <= n; i += kChains) {
    for (size_t k = 0; k < kChains; ++k) add(i + k, sum[k]);
  }
  for (; i < n; ++i) add(i, sum[0]);
  for (size_t c = 0; c < kVecs; ++c) {
    for (size_t k = 1; k < kChains; ++k) sum[0][c] += sum[k][c];
    StoreDoubles(out + c * kLanesD, LoadDoubles(out + c * kLanesD) + sum[0][c]);
  }
}

void Combine(const double* w, size_t n, const double* rows, size_t columns, double* out) {
  if (n == 0) return;  // there may be no rows to point to
  size_t l = 0;
  for (; l + 4 * kLanesD <= columns; l += 4 * kLanesD) {
    CombineTile<4, 1>(w, n, rows + l, columns, out + l);
  }
  for (; l + kLanesD <= columns; l += kLanesD) {
    CombineTile<1, 4>(w, n, rows + l, columns, out + l);
  }
  for (; l < columns; ++l) {
    double sum = 0;
    for (size_t i = 0; i < n; ++i) sum += w[i] * rows[i * columns + l];
    out[l] += sum;
  }
}
