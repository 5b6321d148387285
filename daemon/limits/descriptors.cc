#include "daemon/limits/descriptors.h"

#include <sys/resource.h>

#include <algorithm>
#include <utility>

namespace prefixd::daemon {
namespace {

// Segments that are kept open, the catalog's files, I/O rings, regions, sockets that listen.
constexpr uint64_t kOwn = 256;
// A socket, and the eventfd of a ring of steps.
constexpr uint64_t kEachConnection = 2;
constexpr uint64_t kLeastConnections = 16, kLeastPuts = 16;

}  // namespace

Result<DescriptorShares> DivideDescriptors(const Config& config, uint64_t descriptors) {
  constexpr uint64_t kLeast = kOwn + kEachConnection * kLeastConnections + 2 * kLeastPuts;
  if (descriptors < kLeast) {
    return Error{Code::kFailedPrecondition,
                 "the process may open " + std::to_string(descriptors) + " files; prefixd needs " +
                     std::to_string(kLeast) +
                     " at least: raise the limit (ulimit -n, LimitNOFILE)"};
  }
  DescriptorShares d;
  d.connections =
      std::min(config.max_connections, (descriptors - kOwn - 2 * kLeastPuts) / kEachConnection);
  // Sessions hold segments open that puts must leave room for.
  d.puts = std::min((descriptors - kOwn - kEachConnection * d.connections) / 2,
                    config.max_puts * config.max_connections);
  if (d.connections < config.max_connections) {
    d.warning = "there are " + std::to_string(d.connections) +
                " connections at most instead of limits.max_connections = " +
                std::to_string(config.max_connections) + ": the process may open " +
                std::to_string(descriptors) + " files (ulimit -n, LimitNOFILE)";
  }
  return d;
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
