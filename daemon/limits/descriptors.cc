#include "daemon/limits/descriptors.h"

#include <sys/resource.h>

#include <algorithm>
#include <utility>

#include "base/descriptor_limit.h"

namespace prefixd::daemon {
namespace {

// The catalog's files, I/O rings, regions, sockets that listen.
constexpr uint64_t kOwn = 128;
// A socket, and the eventfd of a ring of steps.
constexpr uint64_t kEachConnection = 2;
constexpr uint64_t kLeastConnections = 16, kLeastPuts = 16;

}  // namespace

Result<DescriptorShares> DivideDescriptors(const Config& config, uint64_t descriptors) {
  static_assert(kLeastDescriptors - DescriptorsForSegments(kLeastDescriptors) >=
                kOwn + kEachConnection * kLeastConnections + kLeastPuts);
  if (descriptors < kLeastDescriptors) {
    return Error{Code::kFailedPrecondition,
                 "the process may open " + std::to_string(descriptors) + " files; prefixd needs " +
                     std::to_string(kLeastDescriptors) +
                     " at least: raise the limit (ulimit -n, LimitNOFILE)"};
  }
  const uint64_t http = config.http_listen.empty() ? 0 : config.http_max_connections;
  if (descriptors < kLeastDescriptors + http) {
    return Error{Code::kFailedPrecondition,
                 "the process may open " + std::to_string(descriptors) +
                     " files, which leaves none for http.max_connections: raise the limit (ulimit "
                     "-n, LimitNOFILE)"};
  }
  DescriptorShares d;
  const uint64_t rest = descriptors - kOwn - http - DescriptorsForSegments(descriptors);
  d.connections = std::min(config.max_connections, (rest - kLeastPuts) / kEachConnection);
  d.puts =
      std::min(rest - kEachConnection * d.connections, config.max_puts * config.max_connections);
  if (d.connections < config.max_connections) {
    d.warning = "there are " + std::to_string(d.connections) +
                " connections at most instead of limits.max_connections = " +
                std::to_string(config.max_connections) + ": the process may open " +
                std::to_string(descriptors) + " files (ulimit -n, LimitNOFILE)";
  }
  return d;
}

void LowerConnections(const DescriptorShares& shares, Config* config) {
  if (shares.connections >= config->max_connections) return;
  config->max_connections = shares.connections;
  const uint64_t part = shares.connections - std::max<uint64_t>(1, shares.connections / 4);
  for (uint64_t* most : {&config->max_tcp_connections, &config->max_tenant_connections}) {
    *most = std::min(*most, part);  // 0 stays: three quarters
  }
}

uint64_t RaiseDescriptorLimit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return 1024;
  if (limit.rlim_cur < limit.rlim_max) {
    const rlim_t before = std::exchange(limit.rlim_cur, limit.rlim_max);
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = before;
  }
  return limit.rlim_cur;
}

}  // namespace prefixd::daemon
