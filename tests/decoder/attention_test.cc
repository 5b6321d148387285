// Tests blocked causal attention, the KV cache and the backends' contract against plain float64.
#include <algorithm>
#include <cmath>
#include <random>

#include "attention/rows/rows.h"
#include "decoder/attention/causal_attention.h"
#include "decoder/attention/local_attention.h"
#include "tests/support/seed.h"
#include "tests/support/test.h"

namespace prefixd::decoder {
namespace {

KvGeometry Geometry(uint32_t layers, uint32_t q_heads, uint32_t kv_heads, uint32_t dk, uint32_t dv,
                    DType dtype) {
  KvGeometry g;
  g.n_layers = layers;
  g.n_q_heads = q_heads;
  g.n_kv_heads = kv_heads;
  g.key_dim = dk;
  g.value_dim = dv;
  g.dtype = dtype;
  LayerGeometry layer;
  layer.scale = 1.0f / std::sqrt(float(dk));
  g.layers.assign(layers, layer);
  return g;
}

std::vector<float> Normal(std::mt19937_64& random, size_t n, float spread) {
  std::normal_distribution<float> normal(0, spread);
  std::vector<float> out(n);
  for (float& x : out) x = normal(random);
  return out;
}

TEST(CausalAttention, AgreesWithFloat64) {
  const uint64_t seed = prefixd::testing::Seed("CausalAttention");
  std::mt19937_64 random(seed);
  for (int round = 0; round < 30; ++round) {
    CausalShape s;
    s.n = 1 + uint32_t(random() % (round % 3 == 0 ? 300 : 5));  // beyond one tile of queries
    s.n_past = uint32_t(random() % (round % 2 == 0 ? 1 : 1500));
    s.group = 1 + uint32_t(random() % 4);
    s.key_dim = 2 + uint32_t(random() % 30);
    s.value_dim = 1 + uint32_t(random() % 30);
    s.n_q_heads = s.group + uint32_t(random() % 3);  // the layer's other heads lie beside
    s.scale = 1.0f / std::sqrt(float(s.key_dim));
    const uint32_t keys = s.n_past + s.n;
    const float spread = round % 5 == 0 ? 6.0f : 1.0f;  // sharp heads too
    const auto q = Normal(random, size_t{s.n} * s.n_q_heads * s.key_dim, spread);
    const auto k = Normal(random, size_t{keys} * s.key_dim, spread);
    const auto v = Normal(random, size_t{keys} * s.value_dim, 1.0f);
    constexpr float kUntouched = 12345;
    std::vector<float> y(size_t{s.n} * s.n_q_heads * s.value_dim, kUntouched);
    std::vector<float> lse(size_t{s.n} * s.n_q_heads, kUntouched);
    const CausalHead pointers = {q.data(), k.data(), v.data(), y.data(), lse.data()};
    for (uint32_t tile = 0; tile < CausalTiles(s); ++tile) CausalAttentionTile(s, pointers, tile);
    for (uint32_t i = 0; i < s.n; ++i) {
      for (uint32_t h = 0; h < s.n_q_heads; ++h) {
        const size_t head = size_t{i} * s.n_q_heads + h;
        if (h >= s.group) {
          EXPECT_EQ(lse[head], kUntouched);
          EXPECT_EQ(y[head * s.value_dim], kUntouched);
          continue;
        }
        std::vector<double> score(s.n_past + i + 1);
        for (size_t t = 0; t < score.size(); ++t) {
          for (uint32_t d = 0; d < s.key_dim; ++d) {
            score[t] += double{q[head * s.key_dim + d]} * k[t * s.key_dim + d];
          }
          score[t] *= s.scale;
        }
        const double max = *std::max_element(score.begin(), score.end());
        double z = 0;
        std::vector<double> truth(s.value_dim);
        for (size_t t = 0; t < score.size(); ++t) {
          const double p = std::exp(score[t] - max);
          z += p;
          for (uint32_t d = 0; d < s.value_dim; ++d) truth[d] += p * v[t * s.value_dim + d];
        }
        const double tolerance = 2e-5 * std::max(1.0, std::abs(max));
        ASSERT_NEAR(lse[head], max + std::log(z), tolerance) << "seed " << seed << " " << round;
        for (uint32_t d = 0; d < s.value_dim; ++d) {
          ASSERT_NEAR(y[head * s.value_dim + d], truth[d] / z, tolerance) << "seed " << seed;
        }
      }
    }
  }
}

TEST(KvCache, StoresWhatItAttends) {
  const uint64_t seed = prefixd::testing::Seed("StoresWhatItAttends");
  std::mt19937_64 random(seed);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBf16}) {
    const KvGeometry g = Geometry(2, 4, 2, 6, 5, dtype);
    KvCache cache(g);
    const auto k = Normal(random, 7 * 2 * 6, 1), v = Normal(random, 7 * 2 * 5, 1);
    cache.Append(0, 7, k, v);
    EXPECT_EQ(cache.size(0), 7u);
    EXPECT_EQ(cache.size(), 0u);  // layer 1 has no tokens yet
    cache.Append(1, 3, std::span(k).first(3 * 12), std::span(v).first(3 * 10));
    cache.Append(1, 4, std::span(k).subspan(3 * 12), std::span(v).subspan(3 * 10));
    EXPECT_EQ(cache.size(), 7u);

    std::vector<std::byte> kb(4 * 2 * g.row(0).key_bytes()), vb(4 * 2 * g.row(0).value_bytes());
    ASSERT_TRUE(cache.Export(1, 2, 4, kb, vb).ok());
    std::vector<float> kf(4 * 12), vf(4 * 10);
    ToFloat(dtype, kb.data(), kf);
    ToFloat(dtype, vb.data(), vf);
    const double eps = dtype == DType::kF32 ? 0 : dtype == DType::kF16 ? 1e-3 : 8e-3;
    const double subnormal = dtype == DType::kF16 ? 0x1p-25 : 0;
    for (size_t t = 0; t < 4; ++t) {
      for (uint32_t h = 0; h < 2; ++h) {
        for (size_t d = 0; d < 6; ++d) {
          const float exported = kf[(t * 2 + h) * 6 + d], given = k[((t + 2) * 2 + h) * 6 + d];
          EXPECT_EQ(exported, cache.keys(1, h)[(t + 2) * 6 + d]);
          EXPECT_NEAR(exported, given, eps * std::abs(given) + subnormal);
        }
        for (size_t d = 0; d < 5; ++d) {
          EXPECT_EQ(vf[(t * 2 + h) * 5 + d], cache.values(1, h)[(t + 2) * 5 + d]);
        }
      }
    }
    EXPECT_FALSE(cache.Export(1, 4, 4, kb, vb).ok());
    EXPECT_FALSE(cache.Export(2, 0, 4, kb, vb).ok());
    EXPECT_FALSE(cache.Export(1, 2, 3, kb, vb).ok());
    cache.Truncate(5);
    EXPECT_EQ(cache.size(), 5u);
    EXPECT_EQ(cache.keys(0, 1).size(), 5u * 6);
  }
}

TEST(LocalAttention, RefusesWhatDoesNotFit) {
  KvGeometry g = Geometry(2, 4, 2, 4, 4, DType::kBf16);
  g.layers[1].sliding_window = 8;
  LocalAttention attention(g, 10);
  std::vector<float> q(2 * 16, 1), kv(2 * 8, 1), out(2 * 16);
  const auto attend = [&](uint32_t layer, uint32_t first, uint32_t n) {
    return attention.Attend(layer, first, n, q, kv, kv, out);
  };
  EXPECT_EQ(attend(0, 0, 2).error().code, Code::kFailedPrecondition);
  EXPECT_EQ(attend(0, 10, 1).error().code, Code::kInvalidArgument);
  EXPECT_EQ(attend(1, 10, 2).error().code, Code::kInvalidArgument);
  EXPECT_EQ(attend(2, 10, 2).error().code, Code::kInvalidArgument);
  ASSERT_TRUE(attend(0, 10, 2).ok());
  EXPECT_EQ(attend(0, 10, 2).error().code, Code::kFailedPrecondition);
  EXPECT_TRUE(attend(0, 12, 2).ok());
}

TEST(ObservedAttention, SeesEveryQueryOnce) {
  const KvGeometry g = Geometry(2, 4, 2, 4, 4, DType::kBf16);
  LocalAttention local(g);
  std::vector<std::tuple<uint32_t, uint32_t, uint32_t, float>> seen;
  ObservedAttention attention(
      local, [&](uint32_t layer, uint32_t first, uint32_t n, std::span<const float> q) {
        seen.emplace_back(layer, first, n, q[0]);
      });
  std::vector<float> q(3 * 16, 1), kv(3 * 8, 1), out(3 * 16), same(3 * 16);
  q[0] = 7;
  ASSERT_TRUE(attention.Attend(0, 0, 3, q, kv, kv, out).ok());
  ASSERT_TRUE(attention.Attend(1, 0, 3, q, kv, kv, out).ok());
  EXPECT_EQ(seen, (decltype(seen){{0, 0, 3, 7.0f}, {1, 0, 3, 7.0f}}));
  LocalAttention other(g);
  ASSERT_TRUE(other.Attend(0, 0, 3, q, kv, kv, same).ok());
  EXPECT_EQ(out, same);
}

}  // namespace
}  // namespace prefixd::decoder
