#include "daemon/calls/slow_steps.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "daemon/process/log_event.h"
#include "prefixd/session.h"
#include "prefixd/session_info.h"

namespace prefixd::daemon {

void SlowSteps::Note(std::chrono::nanoseconds took, std::span<const StepRequest> steps,
                     const std::string& request) {
  if (!on() || took < from_) return;
  std::string left_out;
  {
    std::lock_guard lock(mutex_);
    const auto line = lines_.Line();
    if (!line) return;
    left_out = *line;
  }
  const auto time = [](const StepRequest& step) {
    const Ledger l = step.info == nullptr ? Ledger() : step.info->ledger;
    return l.select_ns + l.read_ns + l.compute_ns;
  };
  const StepRequest* slowest = nullptr;
  for (const StepRequest& step : steps) {
    if (step.session == nullptr) continue;
    if (slowest == nullptr || time(step) > time(*slowest)) slowest = &step;
  }
  const auto ms = [](double ns) { return std::round(ns / 1e4) / 100; };
  nlohmann::json fields = {
      {"request", request}, {"ms", ms(double(took.count()))}, {"steps", steps.size()}};
  if (slowest != nullptr) {
    const SessionInfo& session = slowest->session->info();
    fields["session"] = session.id;
    fields["tenant"] = session.tenant;
    fields["prefix"] = session.prefix;
    fields["layer"] = slowest->layer;
    if (!slowest->status.ok()) fields["error"] = slowest->status.error().ToString();
    if (slowest->info != nullptr) {
      const Ledger& ledger = slowest->info->ledger;
      fields["k"] = slowest->info->k;
      fields["select_ms"] = ms(double(ledger.select_ns));
      fields["read_ms"] = ms(double(ledger.read_ns));
      fields["compute_ms"] = ms(double(ledger.compute_ns));
      fields["ssd_bytes"] = ledger.physical_bytes[static_cast<size_t>(Tier::kSsd)];
    }
  }
  LogEvent(LogLevel::kWarn, "slow step" + left_out, fields);
}

}  // namespace prefixd::daemon
