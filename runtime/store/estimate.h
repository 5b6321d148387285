// Estimates how long the ways to a matched prefix take: see prefixd/estimate.h.
//
// Thread-safety: may be called concurrently with everything else.
#pragma once

#include <cstdint>

#include "prefixd/estimate.h"
#include "runtime/store/core.h"

namespace prefixd {

struct EstimateOf {
  const ModelSpec& model;
  std::string_view tenant;  // the match is its own
  const storage::SegmentId& prefix;
  uint32_t n_tokens = 0;
  bool opened = false;  // opening it is done already
};
// What is not known, or gone meanwhile, is unknown in it.
ReuseEstimate EstimateReuse(const Core& core, const EngineSpeed& engine, const EstimateOf& of);

}  // namespace prefixd
