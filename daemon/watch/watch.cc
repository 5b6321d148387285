#include "daemon/watch/watch.h"

#include <algorithm>
#include <utility>

#include "prefixd/session_info.h"

namespace prefixd::daemon {
namespace {

constexpr size_t kMostText = 300;
// So many failures of a tenant are kept with their texts in a second, and of so many tenants:
// clients that fail in a loop cost no more.
constexpr size_t kFailuresPerSecond = 20, kTenantsPerSecond = 32;

int64_t UnixMs() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

}  // namespace

uint64_t Watch::Attached(const std::shared_ptr<Session>& session) {
  const SessionInfo& info = session->info();
  std::lock_guard lock(sessions_mutex_);
  auto it = saved_.find(info.prefix);
  if (it == saved_.end()) {
    if (saved_.size() >= kMostPrefixes) {
      saved_.erase(std::ranges::min_element(
          saved_, {}, [](const auto& entry) { return entry.second.last_unix_ms; }));
    }
    it = saved_.emplace(info.prefix, Saved{}).first;
    it->second.tenant = info.tenant;
    it->second.model = info.model;
  }
  it->second.n_tokens = std::max(it->second.n_tokens, info.n_tokens);
  it->second.last_unix_ms = UnixMs();
  const auto pace = paces_.find(info.model);
  for (Saved* saved : {&it->second, &saved_by_all_}) {
    ++saved->attaches;
    saved->tokens += info.n_tokens;
    if (pace == paces_.end()) continue;
    saved->timed_tokens += info.n_tokens;
    saved->seconds += pace->second.seconds * info.n_tokens / double(pace->second.tokens);
  }
  return Follow(session);
}

uint64_t Watch::Forked(const std::shared_ptr<Session>& session) {
  std::lock_guard lock(sessions_mutex_);
  return Follow(session);
}

uint64_t Watch::Follow(const std::shared_ptr<Session>& session) {
  live_.emplace(next_, Live{session, Clock::now()});
  return next_++;
}

void Watch::Detached(uint64_t number, const Ledger& total) {
  std::lock_guard lock(sessions_mutex_);
  if (live_.erase(number) != 0) ended_ += total;
}

void Watch::Stored(const std::string& model, uint32_t tokens, Clock::duration time) {
  if (tokens == 0) return;
  std::lock_guard lock(sessions_mutex_);
  if (paces_.size() >= kMostModels && !paces_.contains(model)) return;
  Pace& pace = paces_[model];
  pace.tokens += tokens;
  pace.seconds += std::chrono::duration<double>(time).count();
}

void Watch::Failed(std::string_view tenant, std::string_view call, std::string_view request,
                   const Error& error) {
  NoteFailure(tenant, call, request, error);
  failed_[std::min(static_cast<size_t>(error.code), kCodes - 1)].fetch_add(
      1, std::memory_order_relaxed);
}

void Watch::NoteFailure(std::string_view tenant, std::string_view call, std::string_view request,
                        const Error& error) {
  const auto now = Clock::now();
  std::lock_guard lock(failures_mutex_);
  if (now - failures_since_ >= std::chrono::seconds(1)) {
    failures_since_ = now;
    failures_noted_.clear();
  }
  auto noted = failures_noted_.find(tenant);
  if (noted == failures_noted_.end()) {
    if (failures_noted_.size() >= kTenantsPerSecond) return;
    noted = failures_noted_.emplace(tenant, 0).first;
  }
  if (noted->second >= kFailuresPerSecond) return;
  failures_.push_front({UnixMs(), std::string(tenant), std::string(call.substr(0, kMostText)),
                        std::string(request.substr(0, kMostText)), error.code,
                        error.message.substr(0, kMostText)});
  ++noted->second;
  if (failures_.size() > kMostFailures) DropFailure();
}

// Drops the oldest failure of the tenant that has most: no tenant's push those of others out.
void Watch::DropFailure() {
  auto dropped = failures_.end();
  ptrdiff_t most = 0;
  for (auto it = failures_.begin(); it != failures_.end(); ++it) {
    const auto of_tenant = std::ranges::count(failures_, it->tenant, &Failure::tenant);
    if (of_tenant >= most) dropped = it, most = of_tenant;
  }
  failures_.erase(dropped);
}

void Watch::AddPoint(int64_t unix_ms) {
  const LatencyCounts now = latencies_[static_cast<size_t>(Timed::kStep)].counts();
  std::lock_guard lock(points_mutex_);
  if (!marks_.empty()) {
    const LatencyCounts since = now - marks_.back();
    points_.push_back(
        {unix_ms, since.count(), since.QuantileSeconds(0.5), since.QuantileSeconds(0.99)});
  }
  marks_.push_back(now);
  if (marks_.size() > kRecentPoints + 1) marks_.pop_front();
  if (points_.size() > kMostPoints) points_.pop_front();
}

Watch::Report Watch::Take(const std::optional<std::string>& tenant) const {
  Report report;
  struct Held {
    uint64_t number;
    std::shared_ptr<Session> session;
    Clock::time_point since;
  };
  std::vector<Held> live;
  {
    // Together: a session that is detached meanwhile is counted here or there, and once. Whoever
    // owns it lets go of it behind Detached.
    std::lock_guard lock(sessions_mutex_);
    for (const auto& [number, entry] : live_) {
      if (auto session = entry.session.lock()) {
        live.push_back({number, std::move(session), entry.since});
      }
    }
    report.ledger = ended_;
    report.saved = saved_;
    report.saved_by_all = saved_by_all_;
  }
  const auto now = Clock::now();
  for (const auto& [number, session, since] : live) {
    Result<SessionReport> asked = session->report();
    if (!asked.ok()) continue;
    SessionReport& of = *asked;
    report.ledger += of.total;
    if (tenant && of.info.tenant != *tenant) continue;
    Attachment& a = report.sessions.emplace_back();
    a.number = number;
    a.tenant = std::move(of.info.tenant);
    a.model = std::move(of.info.model);
    a.prefix = std::move(of.info.prefix);
    a.n_tokens = of.info.n_tokens;
    a.attached_ms = static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::milliseconds>(now - since).count());
    a.policy = session->policy();
    a.ledger = of.total;
  }
  if (tenant) {
    std::erase_if(report.saved, [&](const auto& entry) { return entry.second.tenant != *tenant; });
  }
  for (size_t i = 0; i < kCodes; ++i) {
    report.failed[i] = failed_[i].load(std::memory_order_relaxed);
  }
  {
    std::lock_guard lock(failures_mutex_);
    report.failures = failures_;
  }
  if (tenant) {
    std::erase_if(report.failures, [&](const Failure& f) { return f.tenant != *tenant; });
  }
  for (size_t i = 0; i < latencies_.size(); ++i) report.latencies[i] = latencies_[i].counts();
  std::lock_guard lock(points_mutex_);
  report.points = points_;
  report.recent = marks_.empty()
                      ? report.latencies[static_cast<size_t>(Timed::kStep)]
                      : report.latencies[static_cast<size_t>(Timed::kStep)] - marks_.front();
  return report;
}

}  // namespace prefixd::daemon
