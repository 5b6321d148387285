// The loops of a CodeScanTable that compilers vectorise by themselves. Included once by each
// code_scan_<isa>.cc inside its unnamed namespace, and free of standard-library templates: code
// built with wider instruction sets must not leak into functions that other files share.

inline int32_t BiasOf(const CodeScanQuery& query, size_t head, size_t block) {
  const int32_t of_block =
      query.block_bias ? query.block_bias[head * query.ld_bias + block] : int16_t{0};
  return query.bias[head] + of_block;
}

inline double ExpTotal(const float* s, size_t n, float shift) {
  // exp(x) = 2^t, t = whole + part: the whole goes to the exponent's bits, the part, within half
  // of zero, to a polynomial. Adding and taking away 1.5 * 2^23 rounds to a whole number.
  constexpr float kLog2E = 1.44269504f, kRound = 12582912.0f;
  // Were it known to compilers, they would branch on it.
  volatile float known_at_run_time[] = {-115.0f, 115.0f};
  // Above zero only what rounding left of scores that differ by millions: still a number then.
  const float least = known_at_run_time[0], most = known_at_run_time[1];
  const float b = shift * kLog2E;
  constexpr size_t kRun = 1024, kLanes = 32;  // runs are summed in float32, then in float64
  double total = 0;
  for (size_t begin = 0; begin < n; begin += kRun) {
    const size_t end = begin + kRun < n ? begin + kRun : n;
    float sums[kLanes] = {};
    size_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (size_t l = 0; l < kLanes; ++l) {
        float t = kLog2E * s[i + l] + b;
        t = t > least ? t : least;
        t = t < most ? t : most;
        const float rounded = t + kRound;
        const float part = t - (rounded - kRound);
        int32_t bits;
        __builtin_memcpy(&bits, &rounded, sizeof bits);
        const float poly = 1.0f + part * (0.69314718f + part * (0.24022651f + part * 0.05550411f));
        int32_t out;
        __builtin_memcpy(&out, &poly, sizeof out);
        out += (int32_t)((uint32_t)bits << 23);
        float value;
        __builtin_memcpy(&value, &out, sizeof value);
        sums[l] += value;
      }
    }
    float sum = 0;
    for (size_t l = 0; l < kLanes; ++l) sum += sums[l];
    for (; i < end; ++i) {
      const float x = s[i] + shift;
      sum += __builtin_expf(x < 79.0f ? x : 79.0f);
    }
    total += (double)sum;
  }
  return total;
}

// T: int16_t or float. n >= 1.
template <typename T>
T Largest(const T* v, size_t n) {
  constexpr size_t kLanes = 64;
  T most[kLanes];
  for (T& m : most) m = v[0];
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t l = 0; l < kLanes; ++l) most[l] = v[i + l] > most[l] ? v[i + l] : most[l];
  }
  for (; i < n; ++i) most[0] = v[i] > most[0] ? v[i] : most[0];
  for (size_t l = 1; l < kLanes; ++l) most[0] = most[l] > most[0] ? most[l] : most[0];
  return most[0];
}

inline size_t CountFrom(const float* x, size_t n, float floor) {
  constexpr size_t kRun = size_t{1} << 20;  // counted in 32 bits
  size_t count = 0;
  for (size_t begin = 0; begin < n; begin += kRun) {
    const size_t end = begin + kRun < n ? begin + kRun : n;
    int32_t some = 0;
    for (size_t i = begin; i < end; ++i) some += x[i] >= floor ? 1 : 0;
    count += (size_t)some;
  }
  return count;
}

inline void Scaled(const int16_t* v, size_t n, float mul, int16_t* out) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: sums are whole numbers, in the lowest bits
  for (size_t i = 0; i < n; ++i) {
    const float rounded = mul * (float)v[i] + kRound;
    int32_t bits;
    __builtin_memcpy(&bits, &rounded, sizeof bits);
    out[i] = (int16_t)bits;
  }
}

inline void Pick(const int16_t* v, const uint32_t* at, size_t n, int16_t* __restrict out) {
  for (size_t i = 0; i < n; ++i) out[i] = v[at[i]];
}

inline void Raise(const int16_t* v, size_t n, float mul, float add, float* __restrict rank) {
  for (size_t i = 0; i < n; ++i) {
    const float score = mul * (float)v[i] + add;
    rank[i] = score > rank[i] ? score : rank[i];
  }
}
