#include "runtime/store/store_reports.h"

#include <algorithm>
#include <chrono>
#include <functional>

#include "prefixd/version.h"

namespace prefixd {

namespace {

// Keeps the entries with the most bytes, in their order.
template <typename T>
void KeepLargest(std::vector<T>& list) {
  if (list.size() <= kMaxStatTenants) return;
  std::vector<uint64_t> bytes;
  for (const T& entry : list) bytes.push_back(entry.bytes);
  std::ranges::nth_element(bytes, bytes.begin() + (kMaxStatTenants - 1), std::greater());
  const uint64_t least = bytes[kMaxStatTenants - 1];
  size_t kept = 0;
  std::erase_if(list,
                [&](const T& entry) { return entry.bytes < least || kept++ >= kMaxStatTenants; });
}

}  // namespace

PrefixSummary SummaryOf(const Core& core, const storage::PrefixInfo& info) {
  PrefixSummary s;
  s.id = info.id.ToString();
  s.model = info.model;
  s.tenant = info.tenant;
  s.label = info.label;
  s.n_tokens = info.n_tokens;
  s.own_tokens = info.own_tokens;
  s.children = info.children;
  s.own_bytes = info.own_bytes;
  s.created_unix_ms = info.created_unix_ms;
  s.last_used_unix_ms = info.last_used_unix_ms;
  s.quarantined = info.quarantined;
  s.reclustered = info.reclustered;
  s.pinned = info.pinned;
  s.expires_unix_ms = info.expires_unix_ms;
  s.quarantine = info.quarantine;
  s.encoding = info.encoding;
  s.encoding_error = info.encoding_error;
  s.kept_tokens = info.kept_rows;
  s.saved_bytes = info.full_bytes - std::min(info.full_bytes, info.file_bytes);
  s.exact_tokens = info.exact_tokens;
  core.resumption->LookAt({&info.chain.back(), 1});
  const auto standing = core.ingest->Get(info.chain.back());
  s.ingest = standing.state;
  if (!core.Derives(info.chain.back())) s.ingest = IngestState::kDeferred;
  if (standing.error) s.ingest_error = standing.error->message;
  return s;
}

RuntimeStats StatsOf(const Core& core) {
  const auto stored = core.storage->stats();
  RuntimeStats stats;
  stats.version = PREFIXD_VERSION;
  stats.compute = core.steps.compute().name();
  stats.io_backend = stored.io_backend;
  stats.uptime_ms = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::milliseconds>(
                                              std::chrono::steady_clock::now() - core.started)
                                              .count());
  const ModelRegistry::Stats models = core.models.stats();
  stats.models = models.models;
  stats.models_bytes = models.bytes;
  stats.models_dropped = models.dropped;
  stats.prefixes = stored.segments;
  stats.sessions = core.services.open;
  stats.sessions_total = core.services.attached;
  stats.steps = core.services.stepped;
  stats.steps_joined = core.steps.queue().joined();
  const OwnMover::Counters& moved = core.mover->counters();
  stats.own_moves = moved.moves;
  stats.own_moved_tokens = moved.tokens;
  stats.own_moves_failed = moved.failed;
  stats.steps_stopped = core.steps.queue().stopped();
  const auto advised = [&](ReuseAdvice advice) {
    return core.advised[static_cast<size_t>(advice)].load(std::memory_order_relaxed);
  };
  stats.advised_restore = advised(ReuseAdvice::kRestore);
  stats.advised_attach = advised(ReuseAdvice::kAttach);
  stats.advised_recompute = advised(ReuseAdvice::kRecompute);
  stats.bytes_on_disk = stored.bytes_on_disk;
  stats.bytes_free = stored.bytes_free;
  stats.bytes_written = stored.bytes_written;
  stats.bytes_read = stored.bytes_read;
  stats.host_tier_bytes = stored.host_tier_bytes;
  stats.host_tier_capacity = stored.host_tier_capacity;
  stats.host_hits = stored.host_hits;
  stats.host_misses = stored.host_misses;
  stats.host_tier_pinned = stored.host_tier_pinned;
  stats.host_evictions = stored.host_evictions;
  stats.host_tier_huge_pages = stored.host_tier_huge_pages;
  stats.host_tier_gpu = core.pinning ? core.pinning->state() : "off";
  for (const auto& t : stored.host_tenants) {
    stats.host_tenants.push_back({t.tenant, t.bytes, t.memory_bytes, t.share_bytes, t.pinned_bytes,
                                  t.hits, t.misses, t.evictions});
  }
  stats.selector_memory_bytes = core.selector_memory.used();
  stats.selector_memory_capacity = core.selector_memory.capacity();
  stats.gathered_rows_bytes = core.steps.gathered_rows().used();
  stats.gathered_rows_capacity = core.steps.gathered_rows().capacity();
  stats.memory_bytes = core.memory->used();
  stats.memory_capacity = core.memory->capacity();
  stats.memory_refused = core.memory->refused();
  for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
    const auto k = static_cast<MemoryKind>(kind);
    stats.memory_kinds.push_back({std::string(MemoryKindName(k)), core.memory->used(k)});
  }
  for (const MemoryBudget::Tenant& t : core.memory->tenants()) {
    stats.memory_tenants.push_back(
        {t.tenant, t.bytes, core.memory->tenant_capacity(), t.host_tier, t.refused});
  }
  stats.checksum_failures = stored.checksum_failures;
  stats.puts = stored.puts;
  stats.puts_aborted = stored.puts_aborted;
  stats.bytes_rewritten = stored.bytes_rewritten;
  stats.reclustered = stored.reclustered;
  stats.compacted = stored.compacted;
  stats.ingest_queue = core.ingest->queued() + core.resumption->left();
  stats.rewrite_queue = core.rewrites->queued();
  stats.preload_queue = core.index_preloader.queued() + core.key_preloader.queued();
  stats.prefetch_queue = core.prefetcher.queued();
  stats.prefetched_bytes = stored.prefetched_bytes;
  stats.prefetch_used_bytes = stored.prefetch_used_bytes;
  stats.prefetch_wasted_bytes = stored.prefetch_wasted_bytes;
  stats.quota_bytes = stored.quota_bytes;
  stats.evictions = stored.evictions;
  stats.evicted_bytes = stored.evicted_bytes;
  stats.expired = stored.expired;
  for (const storage::TenantUsage& t : stored.tenants) {
    stats.tenants.push_back(
        {t.tenant, t.bytes, t.reserved_bytes, t.quota_bytes, t.evictions, t.evicted_bytes});
  }
  KeepLargest(stats.host_tenants);
  KeepLargest(stats.memory_tenants);
  KeepLargest(stats.tenants);
  stats.scrub_bytes = stored.scrub_bytes;
  stats.scrub_damaged = stored.scrub_damaged;
  stats.warmed_bytes = stored.warmed_bytes;
  stats.unchecked_segments = stored.unchecked_segments;
  stats.verified_since_unix_ms = stored.verified_since_unix_ms;
  return stats;
}

}  // namespace prefixd
