#include "bench/storage/encoding_error.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <set>

#include "attention/rows/rows.h"
#include "measure/timing/statistics.h"
#include "storage/segment/row_encoding.h"

namespace prefixd::bench {
namespace {

// Encodes a key and decodes it as a reader does.
class Coder {
 public:
  Coder(uint32_t dim, DType dtype) : row_{dim, 1, dtype} {}

  void ThereAndBack(std::span<const float> key, std::span<float> out) {
    given_.assign(row_.bytes(), std::byte{0});
    back_.resize(row_.key_bytes());
    FromFloat(row_.dtype, key, given_.data());
    const auto encoded = encoder_.Encode(row_, given_);
    storage::DecodeInt8(row_.dtype, encoded.rows.first(sizeof(float) + row_.key_dim), back_.data());
    ToFloat(row_.dtype, back_.data(), out);
  }

 private:
  const RowShape row_;
  storage::RowEncoder encoder_;
  std::vector<std::byte> given_, back_;
};

double Dot(const float* a, const float* b, size_t n) {
  return std::inner_product(a, a + n, b, 0.0);
}

// Returns the indices of the `k` largest scores.
std::vector<uint32_t> Top(const std::vector<double>& scores, size_t k) {
  std::vector<uint32_t> ids(scores.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::nth_element(ids.begin(), ids.begin() + static_cast<ptrdiff_t>(k), ids.end(),
                   [&](uint32_t a, uint32_t b) { return scores[a] > scores[b]; });
  ids.resize(k);
  return ids;
}

struct EncodingSums {
  double key_squares = 0, key_max = 0, keys = 0;
  double score_squares = 0, scores = 0;
  double kept = 0, wanted = 0;
};

void AddHead(const RetrievalTrace& trace, size_t head, EncodingSums& sums) {
  constexpr size_t kQueries = 8;
  const KvGeometry& g = trace.geometry;
  const RetrievalTrace::Head& of = trace.heads[head];
  const size_t dim = g.key_dim, n = trace.n_tokens;
  Coder coder(g.key_dim, g.dtype);
  std::vector<float> back(n * dim);
  for (size_t t = 0; t < n; ++t) {
    const float* key = &of.keys[t * dim];
    coder.ThereAndBack({key, dim}, std::span(back).subspan(t * dim, dim));
    double difference = 0;
    for (size_t i = 0; i < dim; ++i) {
      const double d = double{back[t * dim + i]} - double{key[i]};
      difference += d * d;
    }
    const double relative = difference / std::max(Dot(key, key, dim), 1e-300);
    sums.key_squares += relative;
    sums.key_max = std::max(sums.key_max, std::sqrt(relative));
    sums.keys += 1;
  }
  const double scale = double{g.layers[head / g.n_kv_heads].scale};
  const size_t queries = of.sample_queries.size() / dim;
  const size_t step = std::max<size_t>(1, queries / kQueries);
  const size_t k = std::max<size_t>(1, n / 100);
  std::vector<double> exact(n), rounded(n);
  for (size_t q = 0; q < queries; q += step) {
    const float* query = &of.sample_queries[q * dim];
    for (size_t t = 0; t < n; ++t) {
      exact[t] = scale * Dot(query, &of.keys[t * dim], dim);
      rounded[t] = scale * Dot(query, &back[t * dim], dim);
      sums.score_squares += (exact[t] - rounded[t]) * (exact[t] - rounded[t]);
    }
    sums.scores += double(n);
    const auto wanted = Top(exact, k), got = Top(rounded, k);
    const std::set<uint32_t> found(got.begin(), got.end());
    for (const uint32_t id : wanted) sums.kept += found.contains(id) ? 1 : 0;
    sums.wanted += double(k);
  }
}

}  // namespace

Int8Error MeasureInt8Error(const RetrievalTrace& trace) {
  EncodingSums sums;
  for (size_t head = 0; head < trace.heads.size(); ++head) AddHead(trace, head, sums);
  Int8Error error;
  error.bytes_per_key = double(trace.geometry.key_dim) + sizeof(float);
  error.key_rms = std::sqrt(sums.key_squares / sums.keys);
  error.key_max = sums.key_max;
  error.score_rms = std::sqrt(sums.score_squares / sums.scores);
  error.recall = sums.kept / sums.wanted;
  return error;
}

EncodingSpeed MeasureEncodingSpeed(uint32_t dim, uint32_t rounds) {
  using Clock = std::chrono::steady_clock;
  constexpr size_t kBytes = 256u << 20, kCallRows = 4096;
  const RowShape row{dim, dim, DType::kBf16};
  std::vector<std::byte> rows(kBytes / row.bytes() * row.bytes());
  std::mt19937_64 rng(1);
  std::normal_distribution<float> normal;
  std::vector<float> some(1 << 16);
  for (float& x : some) x = normal(rng);
  std::vector<std::byte> pattern(some.size() * 2);
  FromFloat(row.dtype, some, pattern.data());
  for (size_t at = 0; at < rows.size(); at += pattern.size()) {
    std::memcpy(&rows[at], pattern.data(), std::min(pattern.size(), rows.size() - at));
  }
  const size_t call = kCallRows * row.bytes(), part = sizeof(float) + dim;
  std::vector<std::byte> out(call);
  std::vector<double> encode, decode;
  for (uint32_t round = 0; round < rounds; ++round) {
    double encode_seconds = 0, decode_seconds = 0;
    storage::RowEncoder encoder;
    for (size_t at = 0; at + call <= rows.size(); at += call) {
      const auto begun = Clock::now();
      const auto encoded = encoder.Encode(row, std::span(rows).subspan(at, call));
      const auto between = Clock::now();
      for (size_t i = 0; i < 2 * kCallRows; ++i) {
        storage::DecodeInt8(row.dtype, encoded.rows.subspan(i * part, part),
                            out.data() + i * dim * 2);
      }
      encode_seconds += std::chrono::duration<double>(between - begun).count();
      decode_seconds += std::chrono::duration<double>(Clock::now() - between).count();
    }
    const size_t whole = rows.size() / call * call;
    const auto bytes = static_cast<double>(whole);
    encode.push_back(bytes / encode_seconds);
    decode.push_back(bytes / decode_seconds);
  }
  return {Summarise(encode).median, Summarise(decode).median};
}

}  // namespace prefixd::bench
