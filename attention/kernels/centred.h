// Sums centred first and second powers, channel by channel. Part of body.h: included inside its
// namespace, once per instruction set.

constexpr size_t kCentredRows = 64;  // summed in float32
// Columns of sums that stay in registers with their centres (32 with AVX-512, else 16).
constexpr size_t kCentredVecs = kLanes == 16 ? 8 : 4;

// The centre that sums are taken against, and the sums that are added to; [dim] each.
struct CentredTo {
  const float* centre;
  double* sum;
  double* sum_sq;
};

// Loads the centre's columns in the order in which LoadVecs loads the rows'.
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

// Sums kVecs * kLanes channels (or, with kTail, the last `columns` < kLanes) from channel `at` on:
// several vectors at a time, since each sum is one chain of dependent additions. before(i) is
// called before row i is read. wide: null, or receives the rows as floats, [n][ld_wide], in the
// order of LoadVecs.
template <typename E, size_t kVecs, bool kTail, typename Before>
PREFIXD_INLINE void CentredTile(const std::byte* const* x, size_t n, size_t at, size_t columns,
                                const CentredTo& to, const Before& before, float* wide,
                                size_t ld_wide) {
  VecF mid[kVecs], first[kVecs], second[kVecs];
  CentreVecs<E, kVecs, kTail>(to.centre + at, columns, mid);
#pragma GCC unroll 8
  for (size_t c = 0; c < kVecs; ++c) first[c] = second[c] = VecF{};
  for (size_t i = 0; i < n; ++i) {
    before(i);
    VecF row[kVecs];
    LoadVecs<E, kVecs, kTail>(x[i] + at * E::kBytes, columns, row);
#pragma GCC unroll 8
    for (size_t c = 0; c < kVecs; ++c) {
      if (wide != nullptr) StoreFloats(wide + i * ld_wide + at + c * kLanes, row[c]);
      const VecF d = row[c] - mid[c];
      first[c] += d;
      second[c] += d * d;
    }
  }
  AddVecs<E, kVecs, kTail>(to.sum + at, first, columns);
  AddVecs<E, kVecs, kTail>(to.sum_sq + at, second, columns);
}

// Sums n <= kCentredRows rows. before and wide are those of a tile; wide REQUIRES x.dim to be a
// multiple of 2 * kLanes.
template <typename E, typename Before>
PREFIXD_INLINE void CentredSlice(const std::byte* const* x, size_t n, size_t dim,
                                 const CentredTo& to, const Before& before, float* wide) {
  const auto nothing = [](size_t) {};
  size_t l = 0;
  if (dim >= kCentredVecs * kLanes) {
    CentredTile<E, kCentredVecs, false>(x, n, 0, 0, to, before, wide, dim);
    l = kCentredVecs * kLanes;
  } else {
    for (size_t i = 0; i < n; ++i) before(i);
  }
  for (; l + kCentredVecs * kLanes <= dim; l += kCentredVecs * kLanes) {
    CentredTile<E, kCentredVecs, false>(x, n, l, 0, to, nothing, wide, dim);
  }
  for (; l + 2 * kLanes <= dim; l += 2 * kLanes) {
    CentredTile<E, 2, false>(x, n, l, 0, to, nothing, wide, dim);
  }
  if (l + kLanes <= dim) {
    CentredTile<E, 1, false>(x, n, l, 0, to, nothing, nullptr, 0);
    l += kLanes;
  }
  if (l < dim) CentredTile<E, 1, true>(x, n, l, dim - l, to, nothing, nullptr, 0);
}

// Sums vectors [begin, end) of x, at most kCentredRows.
template <typename E>
void CentredSlice(const VectorBlock& x, size_t begin, size_t end, const CentredTo& to) {
  const std::byte* rows[kCentredRows];
  for (size_t i = begin; i < end; ++i) rows[i - begin] = VectorAt(x, i);
  CentredSlice<E>(
      rows, end - begin, x.dim, to, [](size_t) {}, nullptr);
}

// Sums scattered vectors while Bring's loads bring them into the caches: the memory takes longer
// than the sums. The sums stay kLag rows behind the loads, so that they never wait for the memory
// and fill the processor's window.
template <typename E>
void CentredSliceBrought(const VectorBlock& x, size_t begin, size_t end, const CentredTo& to,
                         float* wide) {
  constexpr size_t kLag = 16;
  const size_t n = end - begin;
  const std::byte* rows[kCentredRows];
  for (size_t i = 0; i < n; ++i) rows[i] = VectorAt(x, begin + i);
  Bring(x, begin, n < kLag ? end : begin + kLag);
  CentredSlice<E>(
      rows, n, x.dim, to,
      [&](size_t i) {
        if (i + kLag < n) BringOne(x, begin + i + kLag);
      },
      wide);
}

template <typename E>
void CentredSums(const VectorBlock& x, const CentredTo& to) {
  for (size_t begin = 0; begin < x.n; begin += kCentredRows) {
    const size_t end = x.n - begin < kCentredRows ? x.n : begin + kCentredRows;
    CentredSlice<E>(x, begin, end, to);
  }
}

void CentredSumsAny(const VectorBlock& x, const float* centre, double* sum, double* sum_sq) {
  const CentredTo to = {centre, sum, sum_sq};
  switch (x.dtype) {
    case DType::kF32:
      CentredSums<F32>(x, to);
      break;
    case DType::kF16:
      CentredSums<F16>(x, to);
      break;
    case DType::kBf16:
      CentredSums<Bf16>(x, to);
      break;
  }
}
