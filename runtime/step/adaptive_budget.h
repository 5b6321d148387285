// Spreads one hard budget of retrieved tokens per decode step over all heads of all layers, by how
// much attention mass each head is estimated to miss (attention/step/missing_mass.h).
//
// A round is one decode step: it ends when a head comes again. Each head takes its part once in a
// round, so that no round ever reads more than the fixed plan would. A head's missing mass is known
// from its last steps ([PrHS]: rho_z without further reading).
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
  // k: [heads], tokens per head in the fixed plan; most: tokens in the mid region.
  AdaptiveBudget(std::vector<uint32_t> k, uint32_t most);

  // Returns k for each of `n` heads from `first` on, which step together.
  std::vector<uint32_t> Take(size_t first, uint32_t n);
  // Records a head's mean rho_z after a step that read k tokens.
  void Note(size_t head, double rho_z, uint32_t k);

 private:
  void Allocate();

  const uint32_t most_;
  const std::vector<uint32_t> fixed_;  // [heads]
  uint64_t total_ = 0;
  std::mutex mutex_;
  std::vector<uint32_t> k_;   // [heads], in this round
  std::vector<double> pull_;  // [heads] running mean of rho_z k; NaN: not known yet
  std::vector<bool> taken_;   // [heads], in this round
};

}  // namespace prefixd
