// The tenants of the soak: what each presents to the daemon, which clients are whose, and how long
// their steps took.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "prefixd/client.h"
#include "tests/soak/soak.h"
#include "tests/soak/step_times.h"

namespace prefixd::soak {

class Tenants {
 public:
  // Makes a token for each and writes the daemon's file of their hashes. With more than one tenant
  // the last one floods.
  Status Make(const std::vector<std::string>& names, const std::filesystem::path& file);

  size_t size() const { return names_.size(); }
  size_t flooding() const { return names_.size() > 1 ? names_.size() - 1 : SIZE_MAX; }
  ConnectOptions As(size_t tenant) const;
  // A sixth of the clients are the flood's; the others share the rest evenly.
  size_t OfClient(uint32_t client, uint32_t clients) const;

  // Adds a point of every tenant's steps since the last call.
  void Sample(double at, const StepTimes& times, TenantReport& report);
  // Adds what the whole run was to each.
  void Finish(const StepTimes& times, Report& report) const;

 private:
  std::vector<std::string> names_, tokens_;
  std::vector<StepBins> last_;
};

}  // namespace prefixd::soak
