// Makes keys, values and queries of a realistic shape for one layer: keys gather around topics, a
// few channels carry a large mean, queries are shifted towards some topics.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace prefixd::bench {

class SyntheticKv {
 public:
  static constexpr uint32_t kTopics = 64;

  SyntheticKv(uint32_t kv_heads, uint32_t dim, uint64_t seed)
      : heads_(kv_heads), dim_(dim), rng_(seed), topics_(size_t{kv_heads} * kTopics * dim) {
    for (float& x : topics_) x = normal_(rng_);
  }

  // Writes the next token's k and v [kv_heads][dim].
  void Token(float* k, float* v) {
    if (rng_() % 32 == 0) topic_ = static_cast<uint32_t>(rng_() % kTopics);  // topics come in runs
    for (uint32_t h = 0; h < heads_; ++h) {
      const float* centre = Topic(h, topic_);
      for (uint32_t j = 0; j < dim_; ++j) {
        k[h * dim_ + j] = centre[j] + 0.7f * normal_(rng_) + (j % 61 == 3 ? 8.0f : 0.0f);
        v[h * dim_ + j] = 0.5f * centre[(j + 7) % dim_] + normal_(rng_);
      }
    }
  }
  // Writes a query row [dim] of KV head h.
  void Query(uint32_t h, float* q) {
    const float* centre = Topic(h, static_cast<uint32_t>(rng_() % kTopics));
    for (uint32_t j = 0; j < dim_; ++j) q[j] = 0.6f * centre[j] + 0.8f * normal_(rng_);
  }

 private:
  const float* Topic(uint32_t h, uint32_t t) const {
    return &topics_[(size_t{h} * kTopics + t) * dim_];
  }

  uint32_t heads_, dim_;
  std::mt19937_64 rng_;
  std::normal_distribution<float> normal_;
  std::vector<float> topics_;
  uint32_t topic_ = 0;
};

}  // namespace prefixd::bench
