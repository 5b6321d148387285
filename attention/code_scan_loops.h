// The loops of a CodeScanTable that compilers vectorise by themselves. Included once by each
// code_scan_<isa>.cc inside its unnamed namespace, and free of standard-library templates: code
// built with wider instruction sets must not leak into functions that other files share.

// T: int16_t or float.
template <typename T>
double ExpSumOf(const T* v, size_t n, float mul, float shift) {
  // exp(x) = 2^t, t = whole + part: the whole goes to the exponent's bits, the part, within half
  // of zero, to a polynomial. Adding and taking away 1.5 * 2^23 rounds to a whole number.
  constexpr float kLog2E = 1.44269504f, kRound = 12582912.0f, kLeast = -115.0f;
  const float a = mul * kLog2E, b = shift * kLog2E;
  constexpr size_t kRun = 1024;  // summed in float32, then in float64
  double total = 0;
  for (size_t begin = 0; begin < n; begin += kRun) {
    const size_t end = begin + kRun < n ? begin + kRun : n;
    float sums[16] = {};
    size_t i = begin;
    for (; i + 16 <= end; i += 16) {
      for (size_t l = 0; l < 16; ++l) {
        float t = a * (float)v[i + l] + b;
        t = t > kLeast ? t : kLeast;
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
    for (size_t l = 0; l < 16; ++l) sum += sums[l];
    for (; i < end; ++i) sum += __builtin_expf(mul * (float)v[i] + shift);
    total += (double)sum;
  }
  return total;
}

double ExpSum(const int16_t* v, size_t n, float mul, float shift) {
  return ExpSumOf(v, n, mul, shift);
}

double ExpTotal(const float* s, size_t n, float shift) { return ExpSumOf(s, n, 1.0f, shift); }

int16_t Largest(const int16_t* v, size_t n) {
  constexpr size_t kLanes = 64;
  int16_t most[kLanes];
  for (int16_t& m : most) m = v[0];
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (size_t l = 0; l < kLanes; ++l) most[l] = v[i + l] > most[l] ? v[i + l] : most[l];
  }
  for (; i < n; ++i) most[0] = v[i] > most[0] ? v[i] : most[0];
  for (size_t l = 1; l < kLanes; ++l) most[0] = most[l] > most[0] ? most[l] : most[0];
  return most[0];
}
