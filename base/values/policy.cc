#include "prefixd/policy.h"

#include <string>

namespace prefixd {

std::string_view StepModeName(StepMode mode) {
  switch (mode) {
    case StepMode::kFull:
      return "full";
    case StepMode::kAnchors:
      return "anchors";
    case StepMode::kRetrieve:
      return "retrieve";
  }
  return "retrieve";
}

Result<StepMode> StepModeFromName(std::string_view name) {
  for (StepMode mode : {StepMode::kFull, StepMode::kAnchors, StepMode::kRetrieve}) {
    if (name == StepModeName(mode)) return mode;
  }
  return InvalidArgument("no step mode named '" + std::string(name) +
                         "'; use full, anchors or retrieve");
}

}  // namespace prefixd
