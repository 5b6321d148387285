#include "bench/prompts/head_trace.h"

#include <cmath>
#include <cstring>
#include <random>

namespace prefixd::bench {
namespace {

constexpr double kRopeBase = 500000;
constexpr uint32_t kRank = 24;     // rank of what keys say about the text
constexpr uint32_t kTopics = 256;  // kinds of things a text is about
constexpr uint32_t kOutliers = 4;  // channel pairs with a dominating mean, as in trained heads
constexpr float kOutlierMean = 6;
constexpr float kKeyNoise = 0.35f;  // what a key holds besides its topics, in each channel
constexpr float kQueryNoise = 0.25f;
constexpr float kQueryGain = 1.6f;    // scores then spread over some 5 nats: a few per cent of the
                                      // tokens carry most of the mass
constexpr double kStepMemory = 0.92;  // correlation of a query with the one of the step before
constexpr double kNewTopic = 0.06;    // chance that a step turns to something else
constexpr double kRunTokens = 48;     // mean length of a run of text about one thing

// Draws numbers from one distribution out of a table, because generating a million keys takes
// seconds.
class Normals {
 public:
  explicit Normals(uint64_t seed) : rng_(seed), table_(1 << 16) {
    std::normal_distribution<float> normal;
    for (float& x : table_) x = normal(rng_);
  }
  float operator()() {
    if (left_ == 0) {
      bits_ = rng_();
      left_ = 4;
    }
    --left_;
    const float x = table_[bits_ & 0xffff];
    bits_ >>= 16;
    return x;
  }
  double Uniform() { return std::uniform_real_distribution<double>()(rng_); }
  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(rng_() % n); }

 private:
  std::mt19937_64 rng_;
  std::vector<float> table_;
  uint64_t bits_ = 0;
  int left_ = 0;
};

class Generator {
 public:
  explicit Generator(const SyntheticOptions& options)
      : options_(options),
        dim_(options.key_dim),
        random_(options.seed),
        basis_(kRank * dim_),
        topics_(kTopics * kRank),
        key_mean_(dim_),
        query_mean_(size_t{options.group} * dim_) {
    for (float& x : basis_) x = random_() / std::sqrt(float(kRank));
    // Some directions of topic space have a much larger part than others.
    for (uint32_t t = 0; t < kTopics; ++t) {
      for (uint32_t r = 0; r < kRank; ++r) {
        topics_[t * kRank + r] = random_() * 2.5f / std::sqrt(1 + 0.5f * float(r));
      }
    }
    for (float& x : key_mean_) x = 0.5f * random_();
    for (float& x : query_mean_) x = 0.4f * random_();
    // Outliers are pairs of channels that RoPE turns slowly, in keys and queries alike.
    for (uint32_t o = 0; o < kOutliers; ++o) {
      const uint32_t channel = dim_ / 2 - 1 - o * 3;
      key_mean_[channel] += o % 2 ? -kOutlierMean : kOutlierMean;
      for (uint32_t g = 0; g < options.group; ++g) {
        query_mean_[g * dim_ + channel] += (o % 2 ? -1.0f : 1.0f) * (0.5f + 0.25f * float(g % 3));
      }
    }
    for (uint32_t j = 0; j < dim_ / 2; ++j) {
      turns_.push_back(std::pow(kRopeBase, -2.0 * j / dim_));
    }
  }

  HeadTrace Run() {
    HeadTrace trace;
    trace.name = "synthetic";
    trace.group = options_.group;
    trace.layer.scale = static_cast<float>(1 / std::sqrt(double(dim_)));
    trace.shape = {dim_, 0, DType::kBf16};
    trace.keys.resize(options_.n_tokens * trace.shape.bytes());
    std::vector<float> row(dim_);
    for (uint32_t i = 0; i < options_.n_tokens; ++i) {
      Key(row);
      Rope(i, row.data());
      FromFloat(DType::kBf16, row, trace.keys.data() + i * trace.shape.bytes());
    }
    // Samples come from the last quarter, far from one another; steps follow the prompt.
    for (const uint32_t position : SampledAt(options_)) {
      aim_.clear();
      Query(position, trace.sample_queries);
    }
    aim_.clear();
    for (uint32_t s = 0; s < options_.steps; ++s) {
      Query(options_.n_tokens + s, trace.step_queries);
    }
    return trace;
  }

 private:
  // Makes the next token's key before RoPE.
  void Key(std::vector<float>& row) {
    if (random_.Uniform() < 1 / kRunTokens) topic_ = random_.Below(kTopics);
    const float* topic = topics_.data() + topic_ * kRank;
    std::vector<float> said(kRank);
    for (uint32_t r = 0; r < kRank; ++r) said[r] = 0.8f * topic[r] + 0.6f * random_();
    for (uint32_t d = 0; d < dim_; ++d) row[d] = key_mean_[d] + kKeyNoise * random_();
    for (uint32_t r = 0; r < kRank; ++r) {
      for (uint32_t d = 0; d < dim_; ++d) row[d] += said[r] * basis_[r * dim_ + d];
    }
  }

  // Appends [group][dim]: each head aims at a drifting mixture of a few topics.
  void Query(uint32_t position, std::vector<float>& out) {
    const bool fresh = aim_.empty() || random_.Uniform() < kNewTopic;
    aim_.resize(size_t{options_.group} * kRank);
    noise_.resize(size_t{options_.group} * dim_);
    const float keep = fresh ? 0.0f : float(kStepMemory);
    const float renew = std::sqrt(1 - keep * keep);
    for (uint32_t g = 0; g < options_.group; ++g) {
      if (fresh) {
        const float* a = topics_.data() + random_.Below(kTopics) * kRank;
        const float* b = topics_.data() + random_.Below(kTopics) * kRank;
        for (uint32_t r = 0; r < kRank; ++r) aim_[g * kRank + r] = 0.8f * a[r] + 0.4f * b[r];
      }
      for (uint32_t r = 0; r < kRank; ++r) aim_[g * kRank + r] += 0.1f * renew * random_();
      std::vector<float> row(dim_);
      for (uint32_t d = 0; d < dim_; ++d) {
        float& noise = noise_[g * dim_ + d];
        noise = keep * noise + renew * kQueryNoise * random_();
        row[d] = query_mean_[g * dim_ + d] + noise;
        for (uint32_t r = 0; r < kRank; ++r) {
          row[d] += kQueryGain * aim_[g * kRank + r] * basis_[r * dim_ + d];
        }
      }
      Rope(position, row.data());
      out.insert(out.end(), row.begin(), row.end());
    }
  }

  void Rope(uint32_t position, float* row) const {
    for (uint32_t j = 0; j < dim_ / 2; ++j) {
      const double angle = position * turns_[j];
      const auto c = static_cast<float>(std::cos(angle)), s = static_cast<float>(std::sin(angle));
      const float a = row[j], b = row[j + dim_ / 2];
      row[j] = a * c - b * s;
      row[j + dim_ / 2] = b * c + a * s;
    }
  }

  const SyntheticOptions options_;
  const uint32_t dim_;
  Normals random_;
  std::vector<float> basis_, topics_, key_mean_, query_mean_;
  std::vector<double> turns_;
  uint32_t topic_ = 0;
  std::vector<float> aim_, noise_;  // state of the last step's queries
};

}  // namespace

std::vector<HeadTrace> HeadTraces(const RetrievalTrace& trace) {
  const KvGeometry& g = trace.geometry;
  std::vector<HeadTrace> out;
  for (size_t i = 0; i < trace.heads.size(); ++i) {
    const RetrievalTrace::Head& from = trace.heads[i];
    HeadTrace& head = out.emplace_back();
    head.name =
        "layer " + std::to_string(i / g.n_kv_heads) + " head " + std::to_string(i % g.n_kv_heads);
    head.group = g.group_size(0);
    head.layer = g.layers[i / g.n_kv_heads];
    head.shape = {g.key_dim, 0, DType::kBf16};
    head.keys.resize(trace.mid.size() * head.shape.bytes());
    FromFloat(DType::kBf16,
              std::span(from.keys).subspan(size_t{trace.mid.begin} * g.key_dim,
                                           size_t{trace.mid.size()} * g.key_dim),
              head.keys.data());
    head.sample_queries = from.sample_queries;
    head.step_queries = from.step_queries;
  }
  return out;
}

std::vector<uint32_t> SampledAt(const SyntheticOptions& options) {
  const uint32_t quarter = options.n_tokens / 4, from = options.n_tokens - quarter;
  std::vector<uint32_t> at;
  for (uint32_t s = 0; s < options.samples; ++s) {
    at.push_back(from + static_cast<uint32_t>(uint64_t{s} * quarter / options.samples));
  }
  return at;
}

HeadTrace SyntheticHead(const SyntheticOptions& options) { return Generator(options).Run(); }

}  // namespace prefixd::bench
