// One hard budget of retrieved tokens per decode step, spread over all heads of all layers by how
// much attention mass each is estimated to miss (attention/step/missing_mass.h).
//
// A round is one decode step: it ends when a layer comes again. Within a round every layer is given
// its part once, so that no round ever reads more than the fixed plan would. What a head misses is
// known from its last steps (spec §8: rho_z at no further reading).
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "attention/step/missing_mass.h"

namespace prefixd {

class AdaptiveBudget {
 public:
  // k: of each head [n_layers][n_kv_heads] in the fixed plan; most: tokens of the mid region.
  AdaptiveBudget(std::vector<uint32_t> k, uint32_t n_kv_heads, uint32_t most);

  // k of each KV head for a step of `layer`.
  std::vector<uint32_t> Take(uint32_t layer);
  // After a step of one head: its mean rho_z when it read k tokens.
  void Note(size_t head, double rho_z, uint32_t k);

 private:
  void Allocate();

  const uint32_t n_kv_heads_, most_;
  const std::vector<uint32_t> fixed_;  // [heads]
  uint64_t total_ = 0;
  std::mutex mutex_;
  std::vector<uint32_t> k_;   // [heads], of this round
  std::vector<double> pull_;  // [heads] running mean of rho_z k; NaN: not known yet
  std::vector<bool> taken_;   // [n_layers], in this round
};

}  // namespace prefixd
