// Sums over vectors: weighted, and of centred first and second powers.
// Part of kernels_body.h: included inside its namespace, once per instruction set.

constexpr size_t kRun = 16;  // vectors summed in float32 before going to float64
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

// kHeads weight rows over kVecs * kLanes columns (or, with kTail, the last `columns` < kLanes) of n
// vectors, from element `at` on.
template <typename E, size_t kHeads, size_t kVecs, bool kTail>
PREFIXD_INLINE void WeightedTile(const float* w, size_t ldw, const std::byte* const* x, size_t n,
                                 size_t at, size_t columns, double* acc, size_t ld_acc) {
  VecF sum[kHeads][kVecs];
#pragma GCC unroll 4
  for (size_t g = 0; g < kHeads; ++g) {
#pragma GCC unroll 4
    for (size_t c = 0; c < kVecs; ++c) sum[g][c] = VecF{};
  }
  for (size_t i = 0; i < n; ++i) {
    const std::byte* p = x[i] + at * E::kBytes;
    VecF row[kVecs];
#pragma GCC unroll 4
    for (size_t c = 0; c < kVecs; ++c) {
      row[c] = kTail ? LoadTail<E>(p, columns) : E::Load(p + c * kLanes * E::kBytes);
    }
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
    for (size_t c = 0; c < kVecs; ++c) {
      AddToDouble(acc + g * ld_acc + at + c * kLanes, sum[g][c], kTail ? columns : kLanes);
    }
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
  for (size_t begin = 0; begin < x.n; begin += kRun) {
    const size_t n = x.n - begin < kRun ? x.n - begin : kRun;
    const std::byte* rows[kRun];
    for (size_t i = 0; i < n; ++i) {
      rows[i] = VectorAt(x, begin + i);
      PrefetchRow(x, begin + i + kRun);
    }
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
