// The loops of a CodeScanTable that compilers vectorise by themselves. Included once by each
// code_scan_<isa>.cc inside its unnamed namespace, and free of standard-library templates: code
// built with wider instruction sets must not leak into functions that other files share.

double ExpSum(const int16_t* v, size_t n, float mul, float shift) {
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

void MaxRank(const int16_t* v, size_t ld, size_t heads, const float* mul, const float* add,
             size_t n, float* rank) {
  for (size_t i = 0; i < n; ++i) rank[i] = mul[0] * (float)v[i] + add[0];
  for (size_t g = 1; g < heads; ++g) {
    const int16_t* row = v + g * ld;
    const float m = mul[g], a = add[g];
    for (size_t i = 0; i < n; ++i) {
      const float x = m * (float)row[i] + a;
      rank[i] = x > rank[i] ? x : rank[i];
    }
  }
}
