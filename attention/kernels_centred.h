// Sums of centred first and second powers, channel by channel.
// Part of kernels_body.h: included inside its namespace, once per instruction set.

constexpr size_t kCentredRows = 64;  // summed in float32

// The centre's columns as LoadVecs has the rows'.
template <typename E, size_t kVecs, bool kTail>
PREFIXD_INLINE void CentreVecs(const float* centre, size_t columns, VecF* out) {
  if constexpr (E::kPairs && kVecs % 2 == 0) {
#pragma GCC unroll 4
    for (size_t c = 0; c < kVecs; c += 2) {
      const FloatPair pair = Apart(centre + c * kLanes);
      out[c] = pair.even;
      out[c + 1] = pair.odd;
    }
  } else {
    LoadVecs<F32, kVecs, kTail>(reinterpret_cast<const std::byte*>(centre), columns, out);
  }
}

// kVecs * kLanes channels (or, with kTail, the last `columns` < kLanes) from channel `at` on:
// several vectors at a time, since each sum is one chain of dependent additions.
template <typename E, size_t kVecs, bool kTail>
PREFIXD_INLINE void CentredTile(const std::byte* const* x, size_t n, size_t at, size_t columns,
                                const float* centre, double* sum, double* sum_sq) {
  VecF mid[kVecs], first[kVecs], second[kVecs];
  CentreVecs<E, kVecs, kTail>(centre + at, columns, mid);
#pragma GCC unroll 4
  for (size_t c = 0; c < kVecs; ++c) first[c] = second[c] = VecF{};
  for (size_t i = 0; i < n; ++i) {
    VecF row[kVecs];
    LoadVecs<E, kVecs, kTail>(x[i] + at * E::kBytes, columns, row);
#pragma GCC unroll 4
    for (size_t c = 0; c < kVecs; ++c) {
      const VecF d = row[c] - mid[c];
      first[c] += d;
      second[c] += d * d;
    }
  }
  AddVecs<E, kVecs, kTail>(sum + at, first, columns);
  AddVecs<E, kVecs, kTail>(sum_sq + at, second, columns);
}

template <typename E>
void CentredSums(const VectorBlock& x, const float* centre, double* sum, double* sum_sq) {
  for (size_t begin = 0; begin < x.n; begin += kCentredRows) {
    const size_t n = x.n - begin < kCentredRows ? x.n - begin : kCentredRows;
    const std::byte* rows[kCentredRows];
    for (size_t i = 0; i < n; ++i) rows[i] = VectorAt(x, begin + i);
    size_t l = 0;
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
