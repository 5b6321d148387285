// Runs the passes that the attention bench times: one layer's decode step given its retrieved set,
// and exact attention over everything.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "attention/step/step.h"
#include "bench/attention/layers.h"

namespace prefixd::bench {

enum class Variant { kNone, kMean, kRank8, kFullCross, kPhiStored, kPhiRecompute };
inline constexpr Variant kVariants[] = {Variant::kNone,      Variant::kMean,
                                        Variant::kRank8,     Variant::kFullCross,
                                        Variant::kPhiStored, Variant::kPhiRecompute};
const char* VariantName(Variant variant);
const char* VariantKey(Variant variant);  // in JSON

// Draws retrieved sets as selectors return them: ascending, one token from each of k equal runs.
std::vector<uint32_t> RandomSets(std::mt19937_64& rng, uint32_t n_tokens, uint32_t k);

// Runs one layer step: every KV head computes over its retrieved rows in place. Aborts on an error,
// because a failed step gives no meaningful time.
class Stepper {
 public:
  Stepper(Team& team, const Layers& layers, const Model& model, uint32_t k);
  uint32_t k() const { return k_; }
  // ids: [head][k].
  double Run(Variant variant, size_t layer, const std::vector<uint32_t>& ids);

 private:
  void Head(size_t h, Variant variant, size_t layer, const uint32_t* ids);

  Team& team_;
  const Layers& layers_;
  const Model& model_;
  const uint32_t k_;
  std::vector<std::vector<RowRef>> refs_;  // [head][k]
  std::vector<float> y_, lse_, rho_;
};

// Computes exact attention of every query head over all rows of a layer.
double ExactPass(Team& team, const Layers& layers, size_t layer, const Model& model);

// Computes the same for the queries of `n_tokens` suffix tokens at once.
double SuffixPass(Team& team, const Layers& layers, size_t layer, const Model& model,
                  uint32_t n_tokens);

}  // namespace prefixd::bench
