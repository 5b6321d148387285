// Decides which connections there may be. Whatever TCP peers do, local clients find a place, and
// whatever one tenant does, others do: both have bounds inside the total. Those that have not said
// hello for a second have a smaller bound, and the longest silent one makes room for a new one.
//
// Thread-safety: the io thread alone uses it.
#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>

#include "daemon/settings/config.h"
#include "prefixd/result.h"

namespace prefixd::daemon {

class ConnectionLimits {
 public:
  explicit ConnectionLimits(const Config& config);

  struct Arrival {
    std::optional<uint64_t> close;  // a silent connection, which does not count any more
    Status admitted;                // kResourceExhausted: there are as many as there may be
  };
  // A new connection; it counts from here on if it is admitted.
  using Clock = std::chrono::steady_clock;
  Arrival Arrive(uint64_t id, bool local, Clock::time_point now = Clock::now());
  // The connection said hello. kResourceExhausted: its tenant has as many as it may. The daemon's
  // own user as admin is not bounded by that.
  Status Greet(uint64_t id, const std::string& tenant, bool admin);
  void Leave(uint64_t id);

  uint64_t tcp() const { return of_kind_[0].open; }

 private:
  struct Entry {
    bool local = false, silent = true, admin = false;
    Clock::time_point since;
    std::string tenant;
  };
  struct Kind {
    uint64_t open = 0, most = 0, silent = 0;
    const char* option = "";
  };
  Kind& KindOf(bool local) { return of_kind_[local ? 1 : 0]; }

  const uint64_t max_silent_, max_tenant_, most_;
  Kind of_kind_[2];                    // TCP, local
  std::map<uint64_t, Entry> entries_;  // ids ascend: the longest silent comes first
  std::map<std::string, uint64_t, std::less<>> of_tenant_;
};

// Three quarters of the total, where the option is 0.
uint64_t MostTcpConnections(const Config& config);
uint64_t MostTenantConnections(const Config& config);

}  // namespace prefixd::daemon
