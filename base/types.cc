#include "prefixd/types.h"

#include <string>
#include <utility>

#include "prefixd/options.h"

namespace prefixd {

std::string_view IngestStateName(IngestState state) {
  switch (state) {
    case IngestState::kPending:
      return "pending";
    case IngestState::kRunning:
      return "running";
    case IngestState::kReady:
      return "ready";
    case IngestState::kFailed:
      return "failed";
  }
  return "pending";
}

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

std::vector<EstimatorVariant> DefaultEstimators() {
  return std::move(ParseVariants("none, moment, moment/r2, moment/r8, moment/full, scan, phi"))
      .value();
}

Result<StepMode> StepModeFromName(std::string_view name) {
  for (StepMode mode : {StepMode::kFull, StepMode::kAnchors, StepMode::kRetrieve}) {
    if (name == StepModeName(mode)) return mode;
  }
  return InvalidArgument("no step mode named '" + std::string(name) +
                         "'; use full, anchors or retrieve");
}

}  // namespace prefixd
