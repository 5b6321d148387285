// Sums over vectors: weighted, and of centred first and second powers.
// Part of kernels_body.h: included inside its namespace, once per instruction set.

constexpr size_t kRun = 16;  // vectors summed in float32 before going to float64

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

// kHeads weight rows over kVecs * kLanes columns (or, with kTail, the last `columns` < kLanes).
template <typename E, size_t kHeads, size_t kVecs, bool kTail>
PREFIXD_INLINE void WeightedTile(const float* w, size_t ldw, const std::byte* x, size_t stride,
                                 size_t n, size_t columns, double* acc, size_t ld_acc) {
  VecF sum[kHeads][kVecs] = {};
#pragma GCC unroll 4
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

// kVecs * kLanes channels (or, with kTail, the last `columns` < kLanes): several at a time, since
// each sum is one chain of dependent additions.
template <typename E, size_t kVecs, bool kTail>
PREFIXD_INLINE void CentredTile(const std::byte* x, size_t stride, size_t n, size_t columns,
                                const float* centre, double* sum, double* sum_sq) {
  VecF mid[kVecs], first[kVecs], second[kVecs];
#pragma GCC unroll 4
  for (size_t c = 0; c < kVecs; ++c) {
    const std::byte* p = reinterpret_cast<const std::byte*>(centre + c * kLanes);
    mid[c] = kTail ? LoadTail<F32>(p, columns) : F32::Load(p);
    first[c] = second[c] = VecF{};
  }
  for (size_t i = 0; i < n; ++i, x += stride) {
#pragma GCC unroll 4
    for (size_t c = 0; c < kVecs; ++c) {
      const std::byte* p = x + c * kLanes * E::kBytes;
      const VecF d = (kTail ? LoadTail<E>(p, columns) : E::Load(p)) - mid[c];
      first[c] += d;
      second[c] += d * d;
    }
  }
#pragma GCC unroll 4
  for (size_t c = 0; c < kVecs; ++c) {
    AddToDouble(sum + c * kLanes, first[c], kTail ? columns : kLanes);
    AddToDouble(sum_sq + c * kLanes, second[c], kTail ? columns : kLanes);
  }
}

template <typename E>
void CentredSums(const VectorBlock& x, const float* centre, double* sum, double* sum_sq) {
  constexpr size_t kRows = 64;  // summed in float32
  for (size_t begin = 0; begin < x.n; begin += kRows) {
    const size_t n = x.n - begin < kRows ? x.n - begin : kRows;
    const std::byte* data = x.data + begin * x.stride;
    size_t l = 0;
    for (; l + 4 * kLanes <= x.dim; l += 4 * kLanes) {
      CentredTile<E, 4, false>(data + l * E::kBytes, x.stride, n, 0, centre + l, sum + l,
                               sum_sq + l);
    }
    for (; l + kLanes <= x.dim; l += kLanes) {
      CentredTile<E, 1, false>(data + l * E::kBytes, x.stride, n, 0, centre + l, sum + l,
                               sum_sq + l);
    }
    if (l < x.dim) {
      CentredTile<E, 1, true>(data + l * E::kBytes, x.stride, n, x.dim - l, centre + l, sum + l,
                              sum_sq + l);
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
