#include "daemon/limits/connection_limits.h"

#include <algorithm>

#include "base/check.h"

namespace prefixd::daemon {
namespace {

// Many clients that connect at one time, as after a restart, are silent for a moment.
constexpr auto kMoment = std::chrono::seconds(1);

Error Full(const char* option, uint64_t most) {
  return {Code::kResourceExhausted, "the daemon has as many connections as it may (" +
                                        std::string(option) + " = " + std::to_string(most) +
                                        "); try again later"};
}

}  // namespace

uint64_t MostTcpConnections(const Config& config) {
  if (config.socket.empty()) return config.max_connections;
  const uint64_t asked = config.max_tcp_connections;
  return asked > 0 ? std::min(asked, config.max_connections)
                   : config.max_connections - std::max<uint64_t>(1, config.max_connections / 4);
}

uint64_t MostTenantConnections(const Config& config) {
  const uint64_t asked = config.max_tenant_connections;
  return asked > 0 ? std::min(asked, config.max_connections)
                   : config.max_connections - config.max_connections / 4;
}

ConnectionLimits::ConnectionLimits(const Config& config)
    : max_silent_(config.max_silent_connections),
      max_tenant_(MostTenantConnections(config)),
      most_(config.max_connections),
      of_kind_{{0, MostTcpConnections(config), 0, "limits.max_tcp_connections"},
               {0, config.max_connections, 0, "limits.max_connections"}} {}

ConnectionLimits::Arrival ConnectionLimits::Arrive(uint64_t id, bool local, Clock::time_point now) {
  Kind& kind = KindOf(local);
  Arrival arrival;
  const auto full = [&] { return kind.open >= kind.most || entries_.size() >= most_; };
  if (kind.silent >= max_silent_ || full()) {
    const auto longest = std::ranges::find_if(entries_, [&](const auto& entry) {
      return entry.second.silent && entry.second.local == local;
    });
    if (longest != entries_.end() && (full() || now - longest->second.since >= kMoment)) {
      arrival.close = longest->first;
      Leave(longest->first);
    }
  }
  if (full()) {
    arrival.admitted = kind.open >= kind.most ? Full(kind.option, kind.most)
                                              : Full("limits.max_connections", most_);
    return arrival;
  }
  entries_.emplace(id, Entry{.local = local, .since = now, .tenant = {}});
  ++kind.open;
  ++kind.silent;
  return arrival;
}

Status ConnectionLimits::Greet(uint64_t id, const std::string& tenant, bool admin) {
  const auto it = entries_.find(id);
  // It made room for another while its hello was under way.
  if (it == entries_.end() || !it->second.silent) {
    return Error{Code::kUnavailable, "the connection made room for another; connect again"};
  }
  if (!admin) {
    uint64_t& open = of_tenant_[tenant];
    if (open >= max_tenant_) {
      return Error{Code::kResourceExhausted, "tenant '" + tenant +
                                                 "' has as many connections as one may "
                                                 "(limits.max_tenant_connections = " +
                                                 std::to_string(max_tenant_) +
                                                 "); try again later"};
    }
    it->second.tenant = tenant;
    ++open;
  }
  it->second.silent = false;
  it->second.admin = admin;
  --KindOf(it->second.local).silent;
  return {};
}

void ConnectionLimits::Leave(uint64_t id) {
  const auto it = entries_.find(id);
  if (it == entries_.end()) return;
  const Entry& entry = it->second;
  Kind& kind = KindOf(entry.local);
  PREFIXD_CHECK(kind.open > 0);
  --kind.open;
  if (entry.silent) {
    --kind.silent;
  } else if (!entry.admin) {
    const auto tenant = of_tenant_.find(entry.tenant);
    PREFIXD_CHECK(tenant != of_tenant_.end() && tenant->second > 0);
    if (--tenant->second == 0) of_tenant_.erase(tenant);
  }
  entries_.erase(it);
}

}  // namespace prefixd::daemon
