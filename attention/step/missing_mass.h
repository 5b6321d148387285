// What a step has not read: certified where the cut is exact, estimated elsewhere, and where more
// reading would help most (spec §8).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "prefixd/result.h"
#include "prefixd/selection.h"

namespace prefixd {

// Certified under an exact cut c: no unread token scores above it, so
// delta <= |R| e^c / (Z_E + |R| e^c). Else the step's own estimate rho_z, called so.
//   lse_exact: log Z_E over what was read; remaining: |R|.
MissingMass MissingMassOf(const Cut& cut, uint64_t remaining, double lse_exact, double rho_z);
// Bound on the mutual information that is lost when delta of the mass is dropped, in nats:
// 2 (h_b(delta) + delta log n), h_b the binary entropy (paper 002). Certified as delta is.
double InformationLoss(double delta, uint64_t n_tokens);

// One KV head's wish for tokens in a step.
struct HeadDemand {
  double missing_mass = 0;  // delta as last estimated, at k_reference tokens
  uint32_t k_reference = 1;
  uint32_t k_min = 0, k_max = 0;  // what it may get
};

// Distributes exactly min(total, sum of k_max) tokens over heads. Missing mass is taken to fall as
// delta(k) = delta_ref (k_ref / k): the next token goes where it saves most, delta_ref k_ref / k^2,
// so that k grows with the square root of delta_ref k_ref within each head's limits. Heads whose
// mass is not known (NaN) or zero get their minimum, and a share only when the others are full.
// kInfeasible when the minimums alone exceed `total`. Deterministic; ties go to lower heads.
Result<std::vector<uint32_t>> AllocateTokens(std::span<const HeadDemand> heads, uint64_t total);

}  // namespace prefixd
