// Describes a session, one step of it, and what the whole of it has read.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "prefixd/estimate.h"
#include "prefixd/kv_shape.h"
#include "prefixd/ledger.h"
#include "prefixd/partition.h"
#include "prefixd/selection.h"
#include "prefixd/stored_part.h"

namespace prefixd {

struct SessionInfo {
  uint64_t id = 0;
  std::string model, tenant, prefix;
  uint32_t n_tokens = 0;
  KvGeometry geometry;
  Anchors anchors;
  std::string estimator;  // what was attached: "phi (length 8192)", "moment, untuned", ...
  uint32_t d_phi = 0;     // 0: no phi cache
  double attach_seconds = 0;
  std::vector<StoredPart> parts;  // how the rows are stored; fixed while the session is attached
  // The tokens before the first derived one. Where they are fewer than n_tokens, what the engine
  // computes over the session is derived, whatever the policy.
  uint32_t exact_tokens = 0;
  ReuseEstimate estimate;          // when it was attached
  uint32_t own_memory_tokens = 0;  // as in AttachSpec
  bool compressed = false;         // of some tokens rows are gone, and the summaries alone are left
};

// Reports one step, summed over KV heads.
struct StepInfo {
  uint32_t k = 0;                    // largest K used by a head
  Ledger ledger;                     // this call only
  std::vector<uint32_t> k_per_head;  // of the KV heads that stepped; mode kRetrieve
  // Of the query heads that stepped: completion share, Z_R / (Z_E + Z_R) [56]; NaN where no
  // estimator serves the head (unless the policy has `adaptive` or `report_missing`, which estimate
  // it anyway).
  std::vector<float> rho_z;
  std::vector<MissingMass> missing;  // likewise, if the policy has `report_missing`
};

struct SessionReport {
  SessionInfo info;
  Ledger total;
  std::vector<Ledger> per_head;  // by HeadIndex, of info.geometry.heads()
  uint32_t own_tokens = 0;       // of the KV head that has the most; 0 after Detach
  uint32_t own_moved = 0;        // the first of them, which lie in the store by now
  // Of those, in memory all the same (StepPolicy::Retain): of the KV head that has the most.
  uint32_t own_retained = 0;
};

}  // namespace prefixd
