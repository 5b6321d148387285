// Provides keys, queries and float64 truth for the tests of index/.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "attention/rows/rows.h"
#include "index/search/key_index.h"
#include "index/search/key_reader.h"
#include "prefixd/selection.h"
#include "tests/support/test.h"

namespace prefixd::index {

using Random = std::mt19937_64;

inline uint32_t Uniform(Random& random, uint32_t low, uint32_t high) {
  return std::uniform_int_distribution<uint32_t>(low, high)(random);
}

inline std::vector<float> Normal(Random& random, size_t n, float deviation = 1) {
  std::normal_distribution<float> normal(0, deviation);
  std::vector<float> values(n);
  for (float& value : values) value = normal(random);
  return values;
}

// TestRows are rows whose keys are `keys` rounded to `dtype`. All other bytes (values, padding) are
// NaN patterns, so that an index that reads them shows.
struct TestRows {
  TestRows(const std::vector<float>& keys, uint32_t key_dim, DType dtype, uint32_t value_dim = 3,
           size_t padding = 0)
      : shape{key_dim, value_dim, dtype},
        stride(shape.bytes() + padding),
        count(keys.size() / key_dim),
        bytes(count * stride, std::byte{0xff}),
        rounded(keys.size()) {
    for (size_t i = 0; i < count; ++i) {
      FromFloat(dtype, std::span<const float>(keys).subspan(i * key_dim, key_dim),
                bytes.data() + i * stride);
      ToFloat(dtype, bytes.data() + i * stride,
              std::span<float>(rounded).subspan(i * key_dim, key_dim));
    }
  }
  RowsView view() const { return {bytes.data(), count, stride, shape}; }

  RowShape shape;
  size_t stride;
  size_t count;
  std::vector<std::byte> bytes;
  std::vector<float> rounded;  // [count][key_dim]
};

inline LayerGeometry Layer(uint32_t key_dim, float softcap = 0) {
  LayerGeometry layer;
  layer.scale = 1.0f / std::sqrt(static_cast<float>(key_dim));
  layer.softcap = softcap;
  return layer;
}

// Makes a request for the queries [group][key_dim] over `rows`, whose first is `first_token`.
inline SearchRequest RequestOver(const TestRows& rows, std::span<const float> queries,
                                 TokenRange candidates, uint32_t k, uint32_t first_token = 0) {
  SearchRequest request;
  request.queries = queries;
  request.group = static_cast<uint32_t>(queries.size() / rows.shape.key_dim);
  request.layer = Layer(rows.shape.key_dim);
  request.candidates = candidates;
  request.k = k;
  request.keys = rows.view();
  request.first_token = first_token;
  return request;
}

// A CountingReader reads keys from rows, whose first is `first_token`, and counts its reads.
class CountingReader final : public KeyReader {
 public:
  explicit CountingReader(const TestRows& rows, uint32_t first_token = 0)
      : rows_(rows), first_(first_token) {}
  Status Gather(std::span<const uint32_t> ids, std::span<std::byte> out) override {
    for (size_t j = 0; j < ids.size(); ++j) Copy(ids[j], out, j);
    return {};
  }
  Status Range(TokenRange tokens, std::span<std::byte> out) override {
    for (uint32_t t = tokens.begin; t < tokens.end; ++t) Copy(t, out, t - tokens.begin);
    return {};
  }
  size_t reads = 0;

 private:
  void Copy(uint32_t token, std::span<std::byte> out, size_t at) {
    const size_t bytes = rows_.shape.key_bytes();
    std::memcpy(out.data() + at * bytes, rows_.view().key(token - first_), bytes);
    ++reads;
  }
  const TestRows& rows_;
  const uint32_t first_;
};

// Returns the scores of tokens [request.candidates) in float64: [group][n].
inline std::vector<double> TrueScores(const SearchRequest& request, const TestRows& rows) {
  const uint32_t dim = rows.shape.key_dim, n = request.candidates.size();
  std::vector<double> scores(size_t{request.group} * n);
  for (uint32_t g = 0; g < request.group; ++g) {
    for (uint32_t i = 0; i < n; ++i) {
      const size_t row = request.candidates.begin + i - request.first_token;
      double dot = 0;
      for (uint32_t d = 0; d < dim; ++d) {
        dot += double{request.queries[g * dim + d]} * rows.rounded[row * dim + d];
      }
      double score = request.layer.scale * dot;
      if (request.layer.softcap > 0) {
        score = request.layer.softcap * std::tanh(score / request.layer.softcap);
      }
      scores[size_t{g} * n + i] = score;
    }
  }
  return scores;
}

struct Truth {
  std::vector<double> scores;  // [group][n]
  std::vector<double> lse;     // [group]
  std::vector<double> rank;    // [n]
  double largest = 0;          // |score|
};

inline Truth TrueRanks(const SearchRequest& request, const TestRows& rows) {
  Truth truth;
  truth.scores = TrueScores(request, rows);
  const size_t n = request.candidates.size();
  truth.rank.assign(n, -std::numeric_limits<double>::infinity());
  for (uint32_t g = 0; g < request.group; ++g) {
    const double* head = truth.scores.data() + g * n;
    const double top = *std::max_element(head, head + n);
    double sum = 0;
    for (size_t i = 0; i < n; ++i) sum += std::exp(head[i] - top);
    truth.lse.push_back(top + std::log(sum));
    for (size_t i = 0; i < n; ++i) {
      truth.rank[i] = std::max(truth.rank[i], head[i] - truth.lse[g]);
      truth.largest = std::max(truth.largest, std::fabs(head[i]));
    }
  }
  return truth;
}

// Checks what every selection must satisfy: size, order, range, one cut per head.
inline void ExpectWellFormed(const Selection& selection, const SearchRequest& request) {
  const size_t n = request.candidates.size();
  EXPECT_EQ(selection.ids.size(), std::min<size_t>(request.k, n));
  EXPECT_EQ(selection.cuts.size(), size_t{request.group});
  for (size_t j = 0; j < selection.ids.size(); ++j) {
    EXPECT_TRUE(request.candidates.contains(selection.ids[j])) << selection.ids[j];
    if (j > 0) {
      EXPECT_LT(selection.ids[j - 1], selection.ids[j]);
    }
  }
}

// Checks that the selection is the exact one up to near-ties within `slack` (ranks), and that its
// cuts are the true ones within `slack`: no token left out scores above them.
inline void ExpectExactSelection(const Selection& selection, const SearchRequest& request,
                                 const TestRows& rows, double slack) {
  ExpectWellFormed(selection, request);
  const size_t n = request.candidates.size();
  if (n == 0 || request.k >= n) return;
  const Truth truth = TrueRanks(request, rows);
  std::vector<bool> taken(n, false);
  for (const uint32_t id : selection.ids) taken[id - request.candidates.begin] = true;
  double worst_in = std::numeric_limits<double>::infinity(), best_out = -worst_in;
  for (size_t i = 0; i < n; ++i) {
    if (taken[i]) {
      worst_in = std::min(worst_in, truth.rank[i]);
    } else {
      best_out = std::max(best_out, truth.rank[i]);
    }
  }
  EXPECT_LE(best_out, worst_in + slack);
  for (uint32_t g = 0; g < request.group; ++g) {
    EXPECT_NEAR(selection.cuts[g].score, truth.lse[g] + best_out, slack) << "head " << g;
    double above = -std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < n; ++i) {
      if (!taken[i]) above = std::max(above, truth.scores[g * n + i]);
    }
    EXPECT_LE(above, selection.cuts[g].score + slack) << "head " << g;
  }
}

// Returns the float32 rounding of scores and of their logsumexp.
inline double FloatSlack(const SearchRequest& request, const TestRows& rows) {
  return request.candidates.size() == 0 ? 0 : 1e-5 * (1 + TrueRanks(request, rows).largest);
}

// AttentionLike keys have topics, a common offset and two outlier channels, as keys have after
// RoPE; queries lean towards a topic but are shifted away from the keys.
struct AttentionLike {
  AttentionLike(Random& random, uint32_t n, uint32_t key_dim, uint32_t topics = 40) : dim(key_dim) {
    centres = Normal(random, size_t{topics} * dim);
    std::vector<float> offset = Normal(random, dim, 0.5f);
    offset[0] += 8;
    offset[dim / 2] -= 12;
    query_shift = Normal(random, dim, 0.7f);
    keys = Normal(random, size_t{n} * dim, 0.7f);
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t topic = Uniform(random, 0, topics - 1);
      for (uint32_t d = 0; d < dim; ++d) keys[i * dim + d] += centres[topic * dim + d] + offset[d];
    }
  }
  // Returns [group][dim] queries: heads of one group lean towards different topics.
  std::vector<float> Queries(Random& random, uint32_t group) const {
    std::vector<float> queries = Normal(random, size_t{group} * dim, 0.8f);
    const auto topics = static_cast<uint32_t>(centres.size() / dim);
    for (uint32_t g = 0; g < group; ++g) {
      const uint32_t topic = Uniform(random, 0, topics - 1);
      for (uint32_t d = 0; d < dim; ++d) {
        queries[g * dim + d] += 1.2f * centres[topic * dim + d] + query_shift[d];
      }
    }
    return queries;
  }

  uint32_t dim;
  std::vector<float> centres, query_shift, keys;
};

inline DType AnyDType(Random& random) {
  return std::array{DType::kF32, DType::kF16, DType::kBf16}[Uniform(random, 0, 2)];
}

}  // namespace prefixd::index
