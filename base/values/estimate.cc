#include "prefixd/estimate.h"

#include <cmath>

namespace prefixd {

Status CheckEngineSpeed(const EngineSpeed& engine) {
  const double rate = engine.prefill_tokens_per_second;
  if (std::isfinite(rate) && rate >= 0) return {};
  return InvalidArgument(
      "prefill_tokens_per_second is a finite number above 0, or 0 where the engine does not know "
      "it");
}

std::string_view EstimateSourceName(EstimateSource source) {
  switch (source) {
    case EstimateSource::kUnknown:
      return "unknown";
    case EstimateSource::kMeasured:
      return "measured";
    case EstimateSource::kEarlier:
      return "earlier";
    case EstimateSource::kGiven:
      return "given";
    case EstimateSource::kLearnt:
      return "learnt";
  }
  return "unknown";
}

std::string_view ReuseAdviceName(ReuseAdvice advice) {
  switch (advice) {
    case ReuseAdvice::kUnknown:
      return "unknown";
    case ReuseAdvice::kRestore:
      return "restore";
    case ReuseAdvice::kAttach:
      return "attach";
    case ReuseAdvice::kRecompute:
      return "recompute";
  }
  return "unknown";
}

ReuseAdvice FastestWay(const ReuseEstimate& estimate, uint32_t answer_tokens) {
  const TimeEstimate &restore = estimate.restore, &recompute = estimate.recompute;
  TimeEstimate attach;
  if (answer_tokens > 0) attach = estimate.retrieve;
  attach.seconds *= answer_tokens;
  if (restore.known() + attach.known() + recompute.known() < 2) return ReuseAdvice::kUnknown;
  // What is stored serves where the times are equal.
  const auto beats = [](const TimeEstimate& a, const TimeEstimate& b) {
    return !b.known() || a.seconds < b.seconds;
  };
  if (recompute.known() && restore.known() && recompute.seconds < restore.seconds &&
      beats(recompute, attach)) {
    return ReuseAdvice::kRecompute;
  }
  if (attach.known() && beats(attach, restore) &&
      !(recompute.known() && beats(recompute, attach))) {
    return ReuseAdvice::kAttach;
  }
  return restore.known() ? ReuseAdvice::kRestore : ReuseAdvice::kUnknown;
}

}  // namespace prefixd
