// Makes random KV rows, queries and feature maps for tests of attention/, gpu/ and the rooms above.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "attention/estimators/feature_map.h"
#include "attention/rows/rows.h"

namespace prefixd::testing {

// Draws cheap reproducible random numbers; normals come from a table, which is enough for test
// data.
class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed), normals_(1 << 13) {
    std::normal_distribution<float> normal;
    for (float& x : normals_) x = normal(engine_);
  }
  // Draws uniformly from [low, high].
  uint32_t Int(uint32_t low, uint32_t high) {
    return low + static_cast<uint32_t>(engine_() % (uint64_t{high} - low + 1));
  }
  double Uniform(double low, double high) {
    return low + (high - low) * static_cast<double>(engine_() >> 11) * 0x1p-53;
  }
  bool Chance(double p) { return Uniform(0, 1) < p; }
  float Normal() { return normals_[engine_() % normals_.size()]; }
  std::vector<float> Normals(size_t n, float scale = 1, float mean = 0) {
    std::vector<float> x(n);
    for (float& v : x) v = mean + scale * Normal();
    return x;
  }
  DType AnyDType() { return static_cast<DType>(Int(1, 3)); }

 private:
  std::mt19937_64 engine_;
  std::vector<float> normals_;
};

// Owns the bytes of rows; the stride may leave a gap, so that rows are misaligned.
class OwnedRows {
 public:
  OwnedRows() = default;
  OwnedRows(RowShape shape, size_t count, size_t gap_bytes = 0)
      : shape_(shape),
        count_(count),
        stride_(shape.bytes() + gap_bytes),
        bytes_(count * stride_, std::byte{0xff}) {}

  RowsView view() const { return {bytes_.data(), count_, stride_, shape_}; }
  size_t count() const { return count_; }
  void Set(size_t i, std::span<const float> key, std::span<const float> value) {
    std::byte* row = bytes_.data() + i * stride_;
    FromFloat(shape_.dtype, key, row);
    FromFloat(shape_.dtype, value, row + shape_.key_bytes());
  }
  std::vector<float> Key(size_t i) const {
    std::vector<float> key(shape_.key_dim);
    ToFloat(shape_.dtype, view().key(i), key);
    return key;
  }
  std::vector<float> Value(size_t i) const {
    std::vector<float> value(shape_.value_dim);
    ToFloat(shape_.dtype, view().value(i), value);
    return value;
  }
  // Returns the rows `ids`, in that order.
  OwnedRows Pick(std::span<const uint32_t> ids) const {
    OwnedRows out(shape_, ids.size(), stride_ - shape_.bytes());
    for (size_t i = 0; i < ids.size(); ++i) {
      std::copy_n(view().key(ids[i]), shape_.bytes(), out.bytes_.data() + i * stride_);
    }
    return out;
  }

 private:
  RowShape shape_;
  size_t count_ = 0, stride_ = 0;
  std::vector<std::byte> bytes_;
};

inline OwnedRows RandomRows(Random& random, RowShape shape, size_t count, float key_scale = 1,
                            float value_scale = 1) {
  OwnedRows rows(shape, count, random.Chance(0.3) ? random.Int(1, 9) : 0);
  for (size_t i = 0; i < count; ++i) {
    rows.Set(i, random.Normals(shape.key_dim, key_scale),
             random.Normals(shape.value_dim, value_scale));
  }
  return rows;
}

// Returns `k` distinct ids out of [begin, end), ascending.
inline std::vector<uint32_t> RandomSubset(Random& random, uint32_t begin, uint32_t end, size_t k) {
  std::vector<uint32_t> ids;
  for (uint32_t i = begin; i < end; ++i) {
    const size_t left = end - i, want = k - ids.size();
    if (random.Uniform(0, 1) * static_cast<double>(left) < static_cast<double>(want)) {
      ids.push_back(i);
    }
  }
  return ids;
}

// Makes a map whose log features spread over a few nats for inputs of unit variance.
inline FeatureMap RandomFeatureMap(Random& random, uint32_t in_dim, uint32_t d_emb,
                                   uint32_t d_phi) {
  const auto fan = [](uint32_t n) { return 1 / std::sqrt(static_cast<float>(n)); };
  FeatureMap map;
  map.in_dim = in_dim;
  map.d_emb = d_emb;
  map.d_phi = d_phi;
  map.w_in = random.Normals(size_t{d_emb} * in_dim, fan(in_dim));
  map.b_in = random.Normals(d_emb, 0.1f);
  map.w1 = random.Normals(size_t{d_emb} * d_emb, fan(d_emb));
  map.b1 = random.Normals(d_emb, 0.1f);
  map.w2 = random.Normals(size_t{d_emb} * d_emb, fan(d_emb));
  map.b2 = random.Normals(d_emb, 0.1f);
  map.w_out = random.Normals(size_t{d_phi} * d_emb, fan(d_emb));
  map.b_out = random.Normals(d_phi, 0.5f);
  map.alpha = static_cast<float>(random.Uniform(-1, 1));
  return map;
}

}  // namespace prefixd::testing
