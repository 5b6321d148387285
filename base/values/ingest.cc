#include "prefixd/ingest.h"

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
    case IngestState::kDeferred:
      return "deferred";
  }
  return "pending";
}

}  // namespace prefixd
