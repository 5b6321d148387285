#include "prefixd/explain.h"

namespace prefixd {

std::string_view MissReasonName(MissReason reason) {
  switch (reason) {
    case MissReason::kDiverges:
      return "diverges";
    case MissReason::kEnds:
      return "ends";
    case MissReason::kNothingStored:
      return "nothing_stored";
    case MissReason::kNoModel:
      return "no_model";
    case MissReason::kModelDiffers:
      return "model_differs";
    case MissReason::kDerived:
      return "derived";
    case MissReason::kExpired:
      return "expired";
    case MissReason::kQuarantined:
      return "quarantined";
    case MissReason::kEvicted:
      return "evicted";
    case MissReason::kEvictedQuota:
      return "evicted_quota";
    case MissReason::kRemoved:
      return "removed";
    case MissReason::kPutRefused:
      return "put_refused";
    case MissReason::kCompressed:
      return "compressed";
  }
  return "nothing_stored";
}

}  // namespace prefixd
