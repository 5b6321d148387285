#include "decoder/attention/causal_attention.h"

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace prefixd::decoder {
namespace {

constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
constexpr uint32_t kTileTokens = 128;
constexpr uint32_t kLanes = 16;  // independent sums, so that the compiler can use vectors

// Returns exp(x) for x <= 0 within 2e-7 of it, relative; 0 below -87. Branch-free, so that loops
// over it become vector code: x = n ln 2 + r, a polynomial for exp(r), n into the exponent bits.
[[gnu::always_inline]] inline float ExpOfNegative(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float clamped = x < -87.0f ? -87.0f : x;
  const float n = (clamped * 1.44269504f + kRound) - kRound;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return x < -87.0f ? 0.0f : p * power;
}

[[gnu::always_inline]] inline float RowMaxOf(const float* s, uint32_t n) {
  float lanes[kLanes];
  for (float& lane : lanes) lane = kNegativeInfinity;
  uint32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (uint32_t l = 0; l < kLanes; ++l) lanes[l] = s[i + l] > lanes[l] ? s[i + l] : lanes[l];
  }
  for (; i < n; ++i) lanes[0] = s[i] > lanes[0] ? s[i] : lanes[0];
  float max = lanes[0];
  for (const float lane : lanes) max = lane > max ? lane : max;
  return max;
}

// s[i] = exp(s[i] - shift); returns their sum.
[[gnu::always_inline]] inline float ExpRowOf(float* s, uint32_t n, float shift) {
  for (uint32_t i = 0; i < n; ++i) s[i] = ExpOfNegative(s[i] - shift);
  float lanes[kLanes] = {};
  uint32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (uint32_t l = 0; l < kLanes; ++l) lanes[l] += s[i + l];
  }
  float sum = 0;
  for (; i < n; ++i) sum += s[i];
  for (const float lane : lanes) sum += lane;
  return sum;
}

// The same loops for wider vectors: of a long prompt's prefill they take a third of the time.
struct RowLoops {
  float (*max)(const float* s, uint32_t n);
  float (*exp)(float* s, uint32_t n, float shift);
};

float RowMax(const float* s, uint32_t n) { return RowMaxOf(s, n); }
float ExpRow(float* s, uint32_t n, float shift) { return ExpRowOf(s, n, shift); }

#if defined(__x86_64__)
[[gnu::target("avx2,fma")]] float RowMaxAvx2(const float* s, uint32_t n) { return RowMaxOf(s, n); }
[[gnu::target("avx2,fma")]] float ExpRowAvx2(float* s, uint32_t n, float shift) {
  return ExpRowOf(s, n, shift);
}
[[gnu::target("avx512f,avx512dq")]] float RowMaxAvx512(const float* s, uint32_t n) {
  return RowMaxOf(s, n);
}
[[gnu::target("avx512f,avx512dq")]] float ExpRowAvx512(float* s, uint32_t n, float shift) {
  return ExpRowOf(s, n, shift);
}
#endif

RowLoops LoopsOfThisMachine() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq")) {
    return {RowMaxAvx512, ExpRowAvx512};
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return {RowMaxAvx2, ExpRowAvx2};
  }
#endif
  return {RowMax, ExpRow};
}

const RowLoops& Loops() {
  static const RowLoops loops = LoopsOfThisMachine();
  return loops;
}

// A tile holds the query tokens [begin, end); its rows are (token, head of the group).
class QueryTile {
 public:
  QueryTile(const CausalShape& shape, uint32_t begin, uint32_t end, const float* q)
      : shape_(shape), begin_(begin), rows_((end - begin) * shape.group) {
    queries_.resize(size_t{rows_} * shape.key_dim);
    for (uint32_t r = 0; r < rows_; ++r) {
      const float* from = q + (size_t{Token(r)} * shape.n_q_heads + Head(r)) * shape.key_dim;
      float* to = queries_.data() + size_t{r} * shape.key_dim;
      for (uint32_t d = 0; d < shape.key_dim; ++d) to[d] = from[d] * shape.scale;
    }
    max_.assign(rows_, kNegativeInfinity);
    sum_.assign(rows_, 0.0f);
    value_.assign(size_t{rows_} * shape.value_dim, 0.0f);
  }

  uint32_t rows() const { return rows_; }

  // Adds keys [first, first + count); `scores` is scratch of rows() * count.
  void AddKeys(uint32_t first, uint32_t count, const float* keys, const float* values,
               std::vector<float>& scores) {
    const auto m = static_cast<int>(rows_), n = static_cast<int>(count);
    const auto dh = static_cast<int>(shape_.key_dim), dv = static_cast<int>(shape_.value_dim);
    scores.resize(size_t{rows_} * count);
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, dh, 1.0f, queries_.data(), dh,
                keys + size_t{first} * shape_.key_dim, dh, 0.0f, scores.data(), n);
    for (uint32_t r = 0; r < rows_; ++r) {
      const uint32_t visible = shape_.n_past + Token(r) + 1;
      const uint32_t seen = visible > first ? std::min(count, visible - first) : 0;
      float* row = scores.data() + size_t{r} * count;
      SoftmaxRow(r, row, seen);
      std::fill(row + seen, row + count, 0.0f);
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, dv, n, 1.0f, scores.data(), n,
                values + size_t{first} * shape_.value_dim, dv, 1.0f, value_.data(), dv);
  }

  void Finish(float* y, float* lse) const {
    for (uint32_t r = 0; r < rows_; ++r) {
      const size_t out = size_t{Token(r)} * shape_.n_q_heads + Head(r);
      const float* from = value_.data() + size_t{r} * shape_.value_dim;
      for (uint32_t d = 0; d < shape_.value_dim; ++d) {
        y[out * shape_.value_dim + d] = from[d] / sum_[r];
      }
      if (lse != nullptr) lse[out] = max_[r] + std::log(sum_[r]);
    }
  }

 private:
  uint32_t Token(uint32_t row) const { return begin_ + row / shape_.group; }
  uint32_t Head(uint32_t row) const { return row % shape_.group; }

  // Turns scores into weights relative to the row's new maximum and rescales what was summed
  // before.
  void SoftmaxRow(uint32_t r, float* row, uint32_t seen) {
    if (seen == 0) return;
    const float new_max = std::max(max_[r], Loops().max(row, seen));
    const float shrink = std::exp(max_[r] - new_max);  // exp(-inf) = 0 the first time
    const float sum = Loops().exp(row, seen, new_max);
    sum_[r] = sum_[r] * shrink + sum;
    if (shrink != 1.0f) {
      float* value = value_.data() + size_t{r} * shape_.value_dim;
      for (uint32_t d = 0; d < shape_.value_dim; ++d) value[d] *= shrink;
    }
    max_[r] = new_max;
  }

  const CausalShape& shape_;
  uint32_t begin_, rows_;
  std::vector<float> queries_, max_, sum_, value_;
};

}  // namespace

uint32_t CausalTiles(const CausalShape& shape) { return (shape.n + kTileTokens - 1) / kTileTokens; }

void CausalAttentionTile(const CausalShape& shape, const CausalHead& head, uint32_t tile) {
  // Scores of one block stay in a core's second-level cache.
  constexpr uint32_t kScoreFloats = 128 * 1024;
  const uint32_t begin = tile * kTileTokens, end = std::min(shape.n, begin + kTileTokens);
  QueryTile queries(shape, begin, end, head.q);
  const uint32_t visible = shape.n_past + end;  // up to the last token of the tile
  const uint32_t block = std::clamp(kScoreFloats / queries.rows(), 256u, 1024u);
  std::vector<float> scores;
  for (uint32_t first = 0; first < visible; first += block) {
    queries.AddKeys(first, std::min(block, visible - first), head.keys, head.values, scores);
  }
  queries.Finish(head.y, head.lse);
}

}  // namespace prefixd::decoder
