#include "runtime/store/store_options.h"

#include <string>

#include "base/tables/runtime_options.h"

namespace prefixd {
namespace {

// Names that CheckOptions has found among the option's choices.
storage::IoBackend IoFromName(const std::string& name) {
  if (name == "uring") return storage::IoBackend::kUring;
  return name == "threads" ? storage::IoBackend::kThreads : storage::IoBackend::kAuto;
}

storage::Eviction EvictionFromName(const std::string& name) {
  return name == "never" ? storage::Eviction::kNever : storage::Eviction::kByScore;
}

}  // namespace

Result<storage::StoreOptions> StorageOptions(const RuntimeOptions& options) {
  PREFIXD_TRY(CheckOptions(options));
  storage::StoreOptions at;
  at.dir = options.dir;
  at.io = IoFromName(options.io);
  at.host_tier_bytes = options.host_tier_bytes;
  at.host_tier_shares = options.host_tier_shares;
  at.host_tier_hugetlb = options.host_tier_hugetlb;
  at.host_tier_mlock = options.host_tier_mlock;
  at.min_free_bytes = options.min_free_bytes;
  at.quota_bytes = options.quota_bytes;
  at.read_deadline_ms = options.read_deadline_ms;
  at.tenant_quota_bytes = options.tenant_quota_bytes;
  at.tenant_quotas = options.tenant_quotas;
  at.eviction = EvictionFromName(options.evict);
  at.encryption_key_file = options.encryption_key_file;
  return at;
}

}  // namespace prefixd
