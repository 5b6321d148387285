#include "runtime/store/store_options.h"

#include <string>

#include "prefixd/stored_part.h"
#include "runtime/derived/token_features.h"

namespace prefixd {
namespace {

Result<storage::IoBackend> IoFromName(const std::string& name) {
  if (name == "auto") return storage::IoBackend::kAuto;
  if (name == "uring") return storage::IoBackend::kUring;
  if (name == "threads") return storage::IoBackend::kThreads;
  return InvalidArgument("io must be auto, uring or threads, not '" + name + "'");
}

Result<storage::Eviction> EvictionFromName(const std::string& name) {
  if (name == "worth") return storage::Eviction::kByWorth;
  if (name == "never") return storage::Eviction::kNever;
  return InvalidArgument("evict must be worth or never, not '" + name + "'");
}

Status CheckOptions(const RuntimeOptions& options) {
  if (options.checkpoint_tokens == 0) {
    return InvalidArgument("checkpoint_tokens must be at least 1");
  }
  if (options.settle_chunk_tokens == 0 || options.settle_chunk_tokens > 65536) {
    return InvalidArgument("settle_chunk_tokens must lie in 1..65536");
  }
  if (options.clusters == 0 || options.clusters > 4096) {
    return InvalidArgument("clusters must lie in 1..4096");
  }
  if (options.phi_features != "auto") {
    PREFIXD_TRY(FeatureFormatFromName(options.phi_features));
  }
  for (const EstimatorVariant& v : options.estimators) {
    if (v.kind != EstimatorKind::kAuto) continue;
    return InvalidArgument("estimators are named one by one; 'auto' is none of them");
  }
  if (options.maintenance_ms == 0) return InvalidArgument("maintenance_ms must be at least 1");
  if (options.scrub_bytes_per_second > 0 && options.scrub_interval_hours == 0) {
    return InvalidArgument("scrub_interval_hours must be at least 1");
  }
  if (options.max_sessions == 0) return InvalidArgument("max_sessions must be at least 1");
  if (options.anchors.n_sink + uint64_t{options.anchors.n_tail} > 65536) {
    return InvalidArgument("anchors are sinks and tail tokens, at most 65536 together");
  }
  for (double budget : options.choice_budgets) {
    if (!(budget > 0 && budget <= 1)) {
      return InvalidArgument("choice_budgets are fractions of the prefix in (0, 1], not " +
                             std::to_string(budget));
    }
  }
  return {};
}

}  // namespace

Result<storage::StoreOptions> StorageOptions(const RuntimeOptions& options) {
  PREFIXD_TRY(CheckOptions(options));
  storage::StoreOptions at;
  at.dir = options.dir;
  PREFIXD_ASSIGN(at.io, IoFromName(options.io));
  at.host_tier_bytes = options.host_tier_bytes;
  at.host_tier_shares = options.host_tier_shares;
  at.host_tier_hugetlb = options.host_tier_hugetlb;
  at.host_tier_mlock = options.host_tier_mlock;
  at.min_free_bytes = options.min_free_bytes;
  at.quota_bytes = options.quota_bytes;
  at.read_deadline_ms = options.read_deadline_ms;
  at.tenant_quota_bytes = options.tenant_quota_bytes;
  at.tenant_quotas = options.tenant_quotas;
  PREFIXD_ASSIGN(at.eviction, EvictionFromName(options.evict));
  PREFIXD_TRY(RowEncodingFromName(options.encoding));
  return at;
}

}  // namespace prefixd
