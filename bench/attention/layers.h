// Makes the attention bench's data: rows of layers as a store keeps them in memory, queries, and
// the summaries of the mid regions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "attention/estimators/feature_map.h"
#include "attention/estimators/moments.h"
#include "attention/estimators/phi_cache.h"
#include "attention/rows/rows.h"
#include "bench/support/team.h"

namespace prefixd::bench {

// The shape is one layer of an 8B model.
inline constexpr uint32_t kKvHeads = 8, kGroup = 4, kDim = 128, kPhiDim = 128;
inline constexpr RowShape kRow{kDim, kDim, DType::kBf16};
inline constexpr LayerGeometry kLayer{0.08838834764831845f, 0, 0};
inline constexpr uint32_t kSinks = 4, kTail = 16, kAnchors = kSinks + kTail;

// Returns the bytes of this machine's largest cache; 32 MiB where the system does not say.
size_t LastLevelCacheBytes();

// Owns memory for rows, filled at random, in huge pages where the system gives them.
class RowMemory {
 public:
  RowMemory(Team& team, size_t bytes);
  ~RowMemory();
  RowMemory(const RowMemory&) = delete;
  RowMemory& operator=(const RowMemory&) = delete;

  const std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  double huge_share() const;  // share of the memory in huge pages

 private:
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

// Views the same memory as layers of n_tokens: [layer][KV head][token]. Borrows the memory.
class Layers {
 public:
  Layers(const RowMemory& memory, uint32_t n_tokens);
  uint32_t n_tokens() const { return n_tokens_; }
  size_t count() const { return count_; }
  size_t bytes() const { return kKvHeads * head_bytes(); }  // per layer
  RowsView Head(size_t layer, size_t h) const;

 private:
  size_t head_bytes() const { return size_t{n_tokens_} * kRow.bytes(); }
  const RowMemory& memory_;
  const uint32_t n_tokens_;
  const size_t count_;
};

// The summaries cover only kSummarised tokens, because their content does not change the cost.
inline constexpr uint32_t kSummarised = 4096;
struct Model {
  std::vector<float> queries;  // [heads][group][dim]
  std::vector<MomentSummary> mean, rank8, full;
  std::vector<PhiCache> phi;
  std::vector<FeatureMap> phi_q, phi_k;
  std::vector<std::byte> codes;  // stored features, with any content
};
Model MakeModel(const Layers& layers);

}  // namespace prefixd::bench
