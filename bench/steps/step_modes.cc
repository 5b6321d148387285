#include "bench/steps/step_modes.h"

namespace prefixd::bench {

std::vector<Mode> Modes(uint32_t k, const StepPolicy::Sharing& sharing, std::string_view only) {
  StepPolicy policy;
  policy.k = k;
  policy.estimator = EstimatorKind::kNone;
  std::vector<Mode> modes;
  StepPolicy full;
  full.mode = StepMode::kFull;
  modes.push_back({"exact attention, every row", "full", full, {}, {}});
  policy.selector = "exact";
  modes.push_back({"exact selector", "exact", policy, {}, {}});
  policy.selector = "codes";
  modes.push_back({"codes", "codes", policy, {}, {}});
  StepPolicy estimated = policy;
  estimated.estimator = EstimatorKind::kAuto;
  modes.push_back({"codes, the rest estimated", "codes_auto", estimated, {}, {}});
  policy.sharing = sharing;
  modes.push_back({"codes, sets shared", "shared", policy, {}, {}});
  std::erase_if(modes, [&](const Mode& mode) {
    return std::string_view(mode.key).find(only) == std::string_view::npos;
  });
  return modes;
}

}  // namespace prefixd::bench
