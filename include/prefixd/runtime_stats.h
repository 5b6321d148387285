// Counts what a store holds and has done; base/tables/statistics.h has name, unit and help of each.
//
// Thread-safety: plain values.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace prefixd {

// A tenant's part of the host tier. Counters begin when the store is opened.
struct HostTierTenant {
  std::string tenant;
  uint64_t bytes = 0;         // pages held
  uint64_t memory_bytes = 0;  // memory taken for the pages
  uint64_t share_bytes = 0;   // memory that the tenant may always have
  uint64_t pinned_bytes = 0;  // pages read in place now; a page pinned twice counts twice
  uint64_t hits = 0, misses = 0, evictions = 0;  // in pages
};

// Memory of the budget by kind, and by tenant. Refusals are calls, since the store was opened.
struct MemoryOfKind {
  std::string kind;  // MemoryKindName (base/memory_budget.h)
  uint64_t bytes = 0;
};
struct MemoryOfTenant {
  std::string tenant;
  uint64_t bytes = 0, capacity = 0;  // beside the host tier, and its bound
  uint64_t host_tier_bytes = 0;
  uint64_t refused = 0;
};

struct TenantStats {
  std::string tenant;
  uint64_t bytes = 0, reserved_bytes = 0;     // stored; promised to puts under way
  uint64_t quota_bytes = 0;                   // 0: none
  uint64_t evictions = 0, evicted_bytes = 0;  // segments, since the start
};

struct RuntimeStats {
  // compute: "cpu", "cuda: <device>" or "cpu, questions on cuda: <device>"
  std::string version, compute;
  std::string io_backend;
  uint64_t uptime_ms = 0;
  uint64_t models = 0, prefixes = 0, sessions = 0, sessions_total = 0, steps = 0;
  // What models take in memory, and models that made room for new ones.
  uint64_t models_bytes = 0, models_dropped = 0;
  uint64_t steps_joined = 0;  // calls that waited for cores and ran together with others
  // Own tokens that sessions moved to the store (AttachSpec::own_memory_tokens): times, tokens, and
  // attempts that failed.
  uint64_t own_moves = 0, own_moved_tokens = 0, own_moves_failed = 0;
  uint64_t steps_stopped = 0;  // times that a call of steps stopped for another tenant's
  // Matches, by the way that was estimated as the fastest (estimate.h).
  uint64_t advised_restore = 0, advised_attach = 0, advised_recompute = 0;
  uint64_t bytes_on_disk = 0, bytes_free = 0, bytes_written = 0, bytes_read = 0;
  uint64_t host_tier_bytes = 0, host_tier_capacity = 0, host_hits = 0, host_misses = 0;
  uint64_t checksum_failures = 0, puts = 0, puts_aborted = 0, ingest_queue = 0;
  // The background rewrites segments (recluster, compact); bytes_written includes bytes_rewritten.
  uint64_t bytes_rewritten = 0, reclustered = 0, compacted = 0, rewrite_queue = 0;
  uint64_t preload_queue = 0;  // heads of attached prefixes that wait for preloading
  // Prefetch (StepPolicy::prefetch): heads that wait; bytes prefetched; of these, bytes that a step
  // used, and bytes wasted because they left the tier unused, were there already, or found no room.
  // The rest lies in the tier and may be used yet.
  uint64_t prefetch_queue = 0, prefetched_bytes = 0, prefetch_used_bytes = 0,
           prefetch_wasted_bytes = 0;
  uint64_t host_tier_pinned = 0, host_evictions = 0;
  // Indexes and exact keys held for selection. Indexes may exceed the capacity.
  uint64_t selector_memory_bytes = 0, selector_memory_capacity = 0;
  uint64_t gathered_rows_bytes = 0, gathered_rows_capacity = 0;  // the gathered-row cache
  // The memory budget: what is taken of it, the budget, and calls that were refused for it.
  uint64_t memory_bytes = 0, memory_capacity = 0, memory_refused = 0;
  std::vector<MemoryOfKind> memory_kinds;
  std::vector<MemoryOfTenant> memory_tenants;  // the daemon shows others only to an admin
  std::string host_tier_huge_pages;            // "hugetlb", "transparent", or "none (why)"
  std::string host_tier_gpu;                   // "off", "registered", or the reason why not
  std::vector<HostTierTenant> host_tenants;
  uint64_t quota_bytes = 0, evictions = 0, evicted_bytes = 0, expired = 0;
  // Of the lists by tenant those with the most bytes are shown, kMaxStatTenants at most.
  std::vector<TenantStats> tenants;  // the daemon shows others only to an admin
  // The scrub: bytes verified and damage found since the start; at or after verified_since_unix_ms
  // everything stored was verified or written.
  uint64_t scrub_bytes = 0, scrub_damaged = 0;
  uint64_t warmed_bytes = 0;        // of rows used last, read into the host tier after the start
  uint64_t unchecked_segments = 0;  // whose header and footer nobody has read since the start
  int64_t verified_since_unix_ms = 0;
};

inline constexpr uint32_t kMaxStatTenants = 1000;

}  // namespace prefixd
