// Computes elementwise functions. Part of body.h: included inside its namespace, once per
// instruction set.

PREFIXD_INLINE VecF Select(VecI mask, VecF yes, VecF no) {
  return (VecF)(((VecI)yes & mask) | ((VecI)no & ~mask));
}

// exp by range reduction to [-ln2/2, ln2/2] and a polynomial of degree 6 (Cephes expf); about one
// unit in the last place. Exactly 0 below the smallest normal result.
PREFIXD_INLINE VecF Exp(VecF x) {
  const VecI tiny = x < Broadcast(-87.33654f);
  x = Select(tiny, VecF{}, x);
  x = Select(x > Broadcast(88.37f), Broadcast(88.37f), x);
  // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
  const VecF magic = Broadcast(12582912.0f);
  const VecF biased = x * Broadcast(1.44269504088896341f) + magic;
  const VecF n = biased - magic;
  VecF r = x - n * Broadcast(0.693359375f);
  r = r - n * Broadcast(-2.12194440e-4f);
  VecF p = Broadcast(1.9875691500e-4f);
  p = p * r + Broadcast(1.3981999507e-3f);
  p = p * r + Broadcast(8.3334519073e-3f);
  p = p * r + Broadcast(4.1665795894e-2f);
  p = p * r + Broadcast(1.6666665459e-1f);
  p = p * r + Broadcast(5.0000001201e-1f);
  p = p * (r * r) + r + Broadcast(1.0f);
  const VecI power = ((VecI)biased - (VecI)magic + 127) << 23;
  return Select(tiny, VecF{}, p * (VecF)power);
}

// Cephes tanhf: a polynomial near zero, 1 - 2 / (exp(2|x|) + 1) elsewhere.
PREFIXD_INLINE VecF Tanh(VecF x) {
  const VecF z = x * x;
  VecF p = Broadcast(-5.70498872745e-3f);
  p = p * z + Broadcast(2.06390887954e-2f);
  p = p * z + Broadcast(-5.37397155531e-2f);
  p = p * z + Broadcast(1.33314422036e-1f);
  p = p * z + Broadcast(-3.33332819422e-1f);
  const VecF small = p * z * x + x;
  const VecI sign = (VecI)x & (int32_t)0x80000000u;
  const VecF magnitude = (VecF)((VecI)x & 0x7fffffff);
  const VecF capped = Select(magnitude > Broadcast(20.0f), Broadcast(20.0f), magnitude);
  const VecF large = 1.0f - 2.0f / (Exp(capped + capped) + 1.0f);
  return Select(magnitude < Broadcast(0.625f), small, (VecF)((VecI)large | sign));
}

// erf by a rational approximation (as in Eigen), a few units in the last place; 1 beyond 4.
PREFIXD_INLINE VecF Erf(VecF x) {
  x = Select(x > Broadcast(4.0f), Broadcast(4.0f), x);
  x = Select(x < Broadcast(-4.0f), Broadcast(-4.0f), x);
  const VecF z = x * x;
  VecF p = Broadcast(-2.72614225801306e-10f);
  p = p * z + Broadcast(2.77068142495902e-08f);
  p = p * z + Broadcast(-2.10102402082508e-06f);
  p = p * z + Broadcast(-5.69250639462346e-05f);
  p = p * z + Broadcast(-7.34990630326855e-04f);
  p = p * z + Broadcast(-2.95459980854025e-03f);
  p = p * z + Broadcast(-1.60960333262415e-02f);
  VecF q = Broadcast(-1.45660718464996e-05f);
  q = q * z + Broadcast(-2.13374055278905e-04f);
  q = q * z + Broadcast(-1.68282697438203e-03f);
  q = q * z + Broadcast(-7.37332916720468e-03f);
  q = q * z + Broadcast(-1.42647390514189e-02f);
  return x * p / q;
}

// Calls `body(vector)` on every full vector of x[0, n) and on the padded tail, storing the result.
template <typename Body>
PREFIXD_INLINE void ForEachVector(const float* x, size_t n, float pad, float* out, Body body) {
  size_t i = 0;
  for (; i + kLanes <= n; i += kLanes) StoreFloats(out + i, body(LoadFloats(x + i)));
  if (i < n) {
    float tail[kLanes];
    for (size_t l = 0; l < kLanes; ++l) tail[l] = i + l < n ? x[i + l] : pad;
    StoreFloats(tail, body(LoadFloats(tail)));
    __builtin_memcpy(out + i, tail, (n - i) * sizeof(float));
  }
}

constexpr size_t kExpRun = 16;  // vectors whose exponentials are summed in float32

// Stores `body(s, exp(s - shift))`; returns the sum of the exponentials.
template <typename Body>
PREFIXD_INLINE double ExpAnd(const float* s, size_t n, float shift, float* out, Body body) {
  double total = 0;
  for (size_t begin = 0; begin < n; begin += kExpRun * kLanes) {
    const size_t count = n - begin < kExpRun * kLanes ? n - begin : kExpRun * kLanes;
    VecF sum = {};
    // A pad of -inf contributes nothing to the sum.
    ForEachVector(s + begin, count, -__builtin_inff(), out + begin, [&](VecF x) {
      const VecF e = Exp(x - Broadcast(shift));
      sum += e;
      return body(x, e);
    });
    float lane[kLanes];
    StoreFloats(lane, sum);
    for (size_t l = 0; l < kLanes; ++l) total += static_cast<double>(lane[l]);
  }
  return total;
}

double ExpShifted(const float* s, size_t n, float shift, float* out) {
  return ExpAnd(s, n, shift, out, [](VecF, VecF e) { return e; });
}

double ExpLessLine(const float* s, size_t n, float shift, const Line& line, float* out) {
  const VecF first = Broadcast(line.first), slope = Broadcast(line.slope);
  const VecF centre = Broadcast(line.centre);
  return ExpAnd(s, n, shift, out,
                [&](VecF x, VecF e) { return e - (first + slope * (x - centre)); });
}

double CentredTotal(const float* s, size_t n, float centre) {
  double total = 0;
  for (size_t begin = 0; begin < n; begin += kExpRun * kLanes) {
    const size_t count = n - begin < kExpRun * kLanes ? n - begin : kExpRun * kLanes;
    VecF sum = {};
    size_t i = 0;
    for (; i + kLanes <= count; i += kLanes) sum += LoadFloats(s + begin + i) - Broadcast(centre);
    float lane[kLanes];
    StoreFloats(lane, sum);
    for (size_t l = 0; l < kLanes; ++l) total += static_cast<double>(lane[l]);
    for (; i < count; ++i) total += static_cast<double>(s[begin + i] - centre);
  }
  return total;
}

bool FiniteMax(const float* s, size_t n, float* max) {
  const float lowest = -__builtin_inff();
  VecF best = Broadcast(lowest);
  VecI bad = {};
  size_t i = 0;
  const auto take = [&](VecF x) {
    best = Select(x > best, x, best);
    bad |= ((VecI)x & 0x7f800000) == 0x7f800000;
  };
  for (; i + kLanes <= n; i += kLanes) take(LoadFloats(s + i));
  if (i < n) {
    float tail[kLanes];
    for (size_t l = 0; l < kLanes; ++l) tail[l] = i + l < n ? s[i + l] : s[i];
    take(LoadFloats(tail));
  }
  float result = lowest;
  bool finite = true;
  for (size_t l = 0; l < kLanes; ++l) {
    if (best[l] > result) result = best[l];
    finite = finite && bad[l] == 0;
  }
  *max = result;
  return finite;
}

void Softcap(float* s, size_t n, float cap) {
  const float inverse = 1.0f / cap;
  ForEachVector(s, n, 0.0f, s, [&](VecF x) { return Tanh(x * inverse) * cap; });
}

void Gelu(float* x, size_t n) {
  ForEachVector(x, n, 0.0f, x, [](VecF v) {
    return Broadcast(0.5f) * v * (Broadcast(1.0f) + Erf(v * Broadcast(0.70710678118654752f)));
  });
}
