// Computes dot products in float32: many queries against many vectors. Part of body.h: included
// inside its namespace, once per instruction set.

// Heads that share a load: as many as registers allow (32 with AVX-512, else 16).
constexpr size_t kDotHeads = kLanes == 16 ? 4 : 2;

// Computes one tile: kHeads queries against kRows vectors, so that each load serves several
// products. `ahead`: rows to prefetch meanwhile, or null; they are prefetched line by line, because
// a burst would wait for the memory and then leave it idle.
template <typename E, size_t kHeads, size_t kRows>
PREFIXD_INLINE void DotTile(const float* q, size_t ldq, const std::byte* const* x, size_t dim,
                            float scale, float* out, size_t ld_out, const AheadRow* ahead) {
  VecF acc[kHeads][kRows];
#pragma GCC unroll 4
  for (size_t g = 0; g < kHeads; ++g) {
#pragma GCC unroll 4
    for (size_t r = 0; r < kRows; ++r) acc[g][r] = VecF{};
  }
  size_t j = 0;
  for (; j + kLanes <= dim; j += kLanes) {
    if (ahead != nullptr && j * E::kBytes % 64 == 0) {
#pragma GCC unroll 4
      for (size_t r = 0; r < kRows; ++r) PrefetchLine(ahead[r], j * E::kBytes);
    }
    VecF row[kRows];
    for (size_t r = 0; r < kRows; ++r) row[r] = E::Load(x[r] + j * E::kBytes);
    for (size_t g = 0; g < kHeads; ++g) {
      const VecF query = LoadFloats(q + g * ldq + j);
      for (size_t r = 0; r < kRows; ++r) acc[g][r] += query * row[r];
    }
  }
  if (j < dim) {
    for (size_t r = 0; r < kRows; ++r) {
      const VecF row = LoadTail<E>(x[r] + j * E::kBytes, dim - j);
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

template <typename E, size_t kHeads>
void DotHeads(const float* q, size_t ldq, const VectorBlock& x, size_t begin, size_t end,
              float scale, float* out, size_t ld_out, bool prefetch) {
  constexpr size_t kRows = 4;
  size_t i = begin;
  for (; i + kRows <= end; i += kRows) {
    AheadRow ahead[kRows];
    const bool ask = prefetch && Prefetcher<kRows>(x, i, ahead);
    const std::byte* rows[kRows];
    for (size_t r = 0; r < kRows; ++r) rows[r] = VectorAt(x, i + r);
    DotTile<E, kHeads, kRows>(q, ldq, rows, x.dim, scale, out + i, ld_out, ask ? ahead : nullptr);
  }
  for (; i < end; ++i) {
    const std::byte* row = VectorAt(x, i);
    DotTile<E, kHeads, 1>(q, ldq, &row, x.dim, scale, out + i, ld_out, nullptr);
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

// With many heads 16-bit vectors are converted once instead of once per tile of heads.
template <typename E>
void Dot(const float* q, size_t ldq, size_t heads, const VectorBlock& x, float scale, float* out,
         size_t ld_out) {
  if (E::kBytes == 4 || heads <= kDirectHeads || x.dim > kConvertMax) {
    DotDirect<E>(q, ldq, heads, x, scale, out, ld_out);
    return;
  }
  constexpr size_t kSlice = 16;
  alignas(64) float converted[kSlice * kConvertMax];
  for (size_t begin = 0; begin < x.n; begin += kSlice) {
    const size_t n = x.n - begin < kSlice ? x.n - begin : kSlice;
    Bring(x, begin, begin + n);
    for (size_t i = 0; i < n; ++i) {
      PrefetchRow(x, begin + i + kPrefetch);
      ConvertVector<E>(VectorAt(x, begin + i), x.dim, converted + i * x.dim);
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
