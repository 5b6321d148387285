#include "base/call_scope.h"

namespace prefixd {

CallLimits CallLimits::Of(uint32_t timeout_ms, const CallCanceller* canceller) {
  CallLimits limits;
  if (timeout_ms > 0) limits.deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  limits.canceller = canceller;
  if (canceller != nullptr) limits.since = canceller->count();
  limits.outer = CarriedScope::Current();
  return limits;
}

Status CallLimits::Check() const {
  Clock::time_point earliest = Clock::time_point::max();
  bool cancelled = false;
  for (const CallLimits* l = this; l != nullptr; l = l->outer) {
    cancelled = cancelled || (l->canceller != nullptr && l->canceller->count() != l->since);
    earliest = std::min(earliest, l->deadline);
  }
  // A client cancels what is late, too.
  if (earliest == Clock::time_point::max() || Clock::now() < earliest) {
    if (cancelled) return Error{Code::kCancelled, "the call was cancelled"};
    return {};
  }
  return Error{
      Code::kDeadlineExceeded,
      "the call did not end by its deadline (call_timeout_ms); what it would have answered "
      "is unknown, and it may be repeated"};
}

CallLimits::Clock::time_point CallLimits::Earliest() const {
  Clock::time_point earliest = deadline;
  for (const CallLimits* l = outer; l != nullptr; l = l->outer) {
    earliest = std::min(earliest, l->deadline);
  }
  return earliest;
}

}  // namespace prefixd
