#include "tests/soak/tenants.h"

#include <algorithm>
#include <utility>

#include "daemon/access/token.h"
#include "daemon/access/token_file.h"

namespace prefixd::soak {
namespace {

TenantPoint PointOf(double at, size_t tenant, const StepBins& bins) {
  return {at, tenant, Count(bins), Percentile(bins, 0.5), Percentile(bins, 0.99)};
}

}  // namespace

Status Tenants::Make(const std::vector<std::string>& names, const std::filesystem::path& file) {
  names_ = names;
  last_.assign(names.size(), StepBins{});
  for (const std::string& name : names_) {
    tokens_.push_back(daemon::MakeToken());
    daemon::TokenGrant grant;
    grant.hash = daemon::HashToken(tokens_.back());
    grant.name = "soak";
    grant.grant.tenant = name;
    PREFIXD_TRY(daemon::AppendToken(file, grant));
  }
  return {};
}

ConnectOptions Tenants::As(size_t tenant) const {
  ConnectOptions options;
  options.tenant = names_[tenant % names_.size()];
  options.token = tokens_[tenant % names_.size()];
  return options;
}

size_t Tenants::OfClient(uint32_t client, uint32_t clients) const {
  if (names_.size() == 1) return 0;
  const uint32_t flood = std::max(1u, clients / 6);
  return client < flood ? flooding() : (client - flood) % (names_.size() - 1);
}

void Tenants::Sample(double at, const StepTimes& times, TenantReport& report) {
  for (size_t t = 0; t < names_.size(); ++t) {
    const StepBins now = times.Of(t);
    report.points.push_back(PointOf(at, t, Since(now, last_[t])));
    last_[t] = now;
  }
}

void Tenants::Finish(const StepTimes& times, Report& report) const {
  report.tenants.names = names_;
  report.tenants.flooding = names_.size() > 1 ? names_.back() : "";
  std::vector<double> p50, p99;
  for (size_t t = 0; t < names_.size(); ++t) {
    report.tenants.whole.push_back(PointOf(0, t, times.Of(t)));
    const TenantPoint& whole = report.tenants.whole.back();
    if (t == flooding() || whole.steps == 0) continue;
    p50.push_back(whole.p50_us / 1000);
    p99.push_back(whole.p99_us / 1000);
  }
  if (p99.empty()) return;
  std::ranges::sort(p50);
  std::ranges::sort(p99);
  report.Find("tenants with steps that do not flood", double(p99.size()), "");
  report.Find("  p50 of their steps, median tenant", p50[p50.size() / 2], "ms");
  report.Find("  p99 of their steps, median tenant", p99[p99.size() / 2], "ms");
  report.Find("  p99 of their steps, worst tenant", p99.back(), "ms");
  if (flooding() == SIZE_MAX) return;
  report.Find("p50 of steps of the tenant that floods",
              report.tenants.whole[flooding()].p50_us / 1000, "ms");
  report.Find("p99 of steps of the tenant that floods",
              report.tenants.whole[flooding()].p99_us / 1000, "ms");
}

}  // namespace prefixd::soak
