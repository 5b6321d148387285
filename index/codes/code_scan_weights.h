// Sums of exponentials of a scan's integers. Included once by each code_scan_<isa>.cc inside its
// unnamed namespace, as code_scan_loops.h is, and free of standard-library templates for the same
// reason. AddWeights is written by hand for each instruction set; Weight says what it does.

// Weights exp(mul (v - top)) in 16-bit fixed point, as squares of h = 2^15 exp(mul (v - top) / 2):
// so the products that a multiply-add of pairs takes anyway reach from 1 to 2^-30.
//   h = 2^(15 - x / 2^bits),   x = floor((top - v) step / 2^16),   step / 2^16 = mul 2^bits / ln 4
struct WeightScale {
  uint16_t step = 0;
  uint16_t whole = 0;  // 2^(16 - bits): times x it has x's whole powers of two above the 16th bit
  double unit = 0;     // what a sum of h (h + 1) is multiplied by
};

// mul above ln 2 counts as ln 2: integers of which each is worth twice the next are scores that
// differ by tens of thousands.
inline WeightScale WeightScaleOf(float mul) {
  // 2^(2^-bits): flooring x makes terms larger by half of its unit on average.
  constexpr double kFloored[] = {0.5,
                                 0.70710678118654757,
                                 0.84089641525371450,
                                 0.91700404320467121,
                                 0.95760328069857365,
                                 0.97857206208770009,
                                 0.98922801319397547,
                                 0.99459942348363317,
                                 0.99729605608547012,
                                 0.99864711289097011,
                                 0.99932332750265075,
                                 0.99966160649624368};
  uint32_t bits = 11;
  float step = mul * 0.72134752f * 2048.0f;
  for (; step >= 1.0f && bits > 1; --bits) step *= 0.5f;
  WeightScale scale;
  const float rounded = step * 65536.0f + 0.5f;
  scale.step = rounded < 65535.0f ? (uint16_t)rounded : (uint16_t)65535;
  scale.whole = (uint16_t)(1u << (16 - bits));
  scale.unit = kFloored[bits] / (32766.0 * 32767.0);
  return scale;
}

// 2^-f in units of 2^-15, f = fraction / 2^16: a cubic in Horner's form, to 1.4e-4. Less than
// 2^15 - 1, so that h + 1 has a sign bit to spare.
inline constexpr uint16_t kPower0 = 32766, kPower1 = 22658, kPower2 = 7558, kPower3 = 1285;

// h (h + 1), which is the square where h is rounded down, on average.
inline uint32_t Weight(int16_t v, int16_t top, const WeightScale& scale) {
  const uint32_t below = (uint16_t)(top - v);
  const uint32_t x = (below * scale.step >> 16) * scale.whole;
  const uint32_t fraction = x & 0xffff, halvings = x >> 16;
  const uint32_t square = kPower2 - (fraction * kPower3 >> 16);
  const uint32_t line = kPower1 - (fraction * square >> 16);
  const uint32_t power = kPower0 - (fraction * line >> 16);
  const uint32_t h = halvings < 16 ? power >> halvings : 0;
  return h * (h + 1);
}

inline constexpr size_t kWeightLanes = 16;
// Adds the weights of v[32 j + 2 l] and its neighbour to sums[l], for each of n / 32 runs j; n is a
// multiple of 32.
void AddWeights(const int16_t* v, size_t n, int16_t top, const WeightScale& scale, float* sums);

inline double WeightSum(const int16_t* v, size_t n, int16_t top, float mul) {
  const WeightScale scale = WeightScaleOf(mul);
  constexpr size_t kRun = 4096;  // runs are summed in float32, then in float64
  double total = 0;
  for (size_t begin = 0; begin < n; begin += kRun) {
    const size_t end = begin + kRun < n ? begin + kRun : n;
    const size_t even = (end - begin) / (2 * kWeightLanes) * (2 * kWeightLanes);
    float sums[kWeightLanes] = {};
    AddWeights(v + begin, even, top, scale, sums);
    float sum = 0;
    for (size_t l = 0; l < kWeightLanes; ++l) sum += sums[l];
    for (size_t i = begin + even; i < end; ++i) sum += (float)Weight(v[i], top, scale);
    total += (double)sum;
  }
  return total * scale.unit;
}
