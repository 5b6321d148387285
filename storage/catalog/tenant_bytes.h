// Counts physical bytes by tenant. Not thread-safe: the owner guards it.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "base/check.h"

namespace prefixd::storage {

class TenantBytes {
 public:
  void Add(const std::string& tenant, uint64_t bytes) {
    if (bytes == 0) return;
    by_tenant_[tenant] += bytes;
    total_ += bytes;
  }
  // REQUIRES: `bytes` is at most what was added before.
  void Subtract(std::string_view tenant, uint64_t bytes) {
    if (bytes == 0) return;
    const auto it = by_tenant_.find(tenant);
    PREFIXD_CHECK(it != by_tenant_.end() && it->second >= bytes, bytes, total_);
    it->second -= bytes;
    if (it->second == 0) by_tenant_.erase(it);
    total_ -= bytes;
  }

  uint64_t total() const { return total_; }
  uint64_t of(std::string_view tenant) const {
    const auto it = by_tenant_.find(tenant);
    return it == by_tenant_.end() ? 0 : it->second;
  }
  // Lists the tenants with bytes.
  const std::map<std::string, uint64_t, std::less<>>& by_tenant() const { return by_tenant_; }

 private:
  std::map<std::string, uint64_t, std::less<>> by_tenant_;
  uint64_t total_ = 0;
};

}  // namespace prefixd::storage
