// Bounds or estimates the mass that a step has not read: certified where the cut is exact,
// estimated elsewhere. Spreads tokens to where more reading would help most ([PrHS]).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/result.h"
#include "prefixd/selection.h"

namespace prefixd {

// Certified under an exact cut c: no unread token scores above it, so delta <= |R| e^c / (Z_E + |R|
// e^c). Otherwise the step's own estimate rho_z, marked as an estimate.
//   lse_exact: log Z_E over what was read; remaining: |R|.
MissingMass MissingMassOf(const Cut& cut, uint64_t remaining, double lse_exact, double rho_z);
// Bounds the mutual information that is lost when delta of the mass is dropped, in nats: 2
// (h_b(delta) + delta log n), h_b the binary entropy ([PrHS]). Certified as delta is.
double InformationLoss(double delta, uint64_t n_tokens);

// One KV head's demand for tokens in a step.
struct HeadDemand {
  double missing_mass = 0;  // delta as last estimated, at k_reference tokens
  uint32_t k_reference = 1;
  uint32_t k_min = 0, k_max = 0;  // bounds of its tokens
};

// Distributes exactly min(total, sum of k_max) tokens over heads. Missing mass is taken to fall as
// delta(k) = delta_ref (k_ref / k): the next token goes where it saves most, delta_ref k_ref / k^2,
// so that k grows with the square root of delta_ref k_ref within each head's limits. Heads whose
// mass is unknown (NaN) or zero get their minimum, and more only when the others are full.
// kInfeasible when the minimums alone exceed `total`. Deterministic; ties go to lower heads.
Result<std::vector<uint32_t>> AllocateTokens(std::span<const HeadDemand> heads, uint64_t total);

}  // namespace prefixd
