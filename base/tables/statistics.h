// Declares the tables of statistics: every member of RuntimeStats, of its lists and of Ledger,
// once. The sum of ledgers, the wire format, `prefixctl status` and `stats`, and the reference page
// follow from them. protocol/server_stats.h has the daemon's own.
//
// Thread-safety: constants.
#pragma once

#include <array>
#include <tuple>

#include "base/tables/field_count.h"
#include "base/tables/statistic.h"
#include "prefixd/ledger.h"
#include "prefixd/runtime_stats.h"

namespace prefixd {

inline constexpr std::array<std::string_view, kTierCount> kTierNames = {"gpu", "host", "ssd"};

template <>
inline constexpr auto kStatistics<Ledger> = [] {
  using enum StatisticUnit;
  using L = Ledger;
  return std::tuple{
      Counter("steps", &L::steps, kNone, "Steps of a layer, times its KV heads."),
      Counter("anchor_tokens", &L::anchor_tokens, kTokens, "Sinks and tail tokens read."),
      Counter("retrieved_tokens", &L::retrieved_tokens, kTokens, "Retrieved tokens read."),
      Counter("retained_tokens", &L::retained_tokens, kTokens,
              "Own tokens attended to in memory by a retention policy, and not read."),
      Counter("summary_tokens", &L::summary_tokens, kTokens,
              "Summaries fetched, once per attach, in token-equivalents."),
      Counter("charged_summary_tokens", &L::charged_summary_tokens, kTokens,
              "What the budgets of steps paid for summaries, in token-equivalents."),
      Counter("logical_bytes", &L::logical_bytes, kBytes,
              "Rows retrieved, summaries and features."),
      Counter("summary_bytes", &L::summary_bytes, kBytes,
              "The part of logical_bytes that is summaries, by estimator.")
          .By("estimator", kEstimatorNames),
      Counter("feature_tokens", &L::feature_tokens, kTokens,
              "Stored features read beside rows, in token-equivalents."),
      Counter("feature_bytes", &L::feature_bytes, kBytes, "Stored features read beside rows."),
      Counter("physical_bytes", &L::physical_bytes, kBytes,
              "What devices and tiers really moved, by tier: whole pages of the SSD, rows of host "
              "memory. Not keys, nor copies of rows, that are held in memory.")
          .By("tier", kTierNames),
      Counter("prefetched_bytes", &L::prefetched_bytes, kBytes,
              "Prefetched into host memory before a step wanted it; not in physical_bytes."),
      Counter("prefetch_used_bytes", &L::prefetch_used_bytes, kBytes,
              "What steps used of what was prefetched for any session of the tenant."),
      Counter("keys_scanned", &L::keys_scanned, kNone, "Keys that selection looked at."),
      Counter("scan_bytes", &L::scan_bytes, kBytes, "Bytes that selection looked at."),
      Counter("selections", &L::selections, kNone,
              "Retrieved sets used. There would be as many searches if each had its own."),
      Counter("retrievals", &L::retrievals, kNone, "Searches made for these sets."),
      Counter("rho_z_sum", &L::rho_z_sum, kNone,
              "Share of the remainder in the whole, per query head, summed."),
      Counter("rho_z_count", &L::rho_z_count, kNone, "Query heads in rho_z_sum."),
      Counter("select_ns", &L::select_ns, kNanoseconds, "Time in selection."),
      Counter("read_ns", &L::read_ns, kNanoseconds, "Time in reading rows."),
      Counter("compute_ns", &L::compute_ns, kNanoseconds, "Time in attention and estimates."),
  };
}();
static_assert(std::tuple_size_v<decltype(kStatistics<Ledger>)> == FieldCount<Ledger>(),
              "every member of Ledger has an entry");

template <>
inline constexpr auto kStatistics<HostTierTenant> = [] {
  using enum StatisticUnit;
  using T = HostTierTenant;
  return std::tuple{
      Word("tenant", &T::tenant, "The tenant.", StatisticKind::kLabel),
      Gauge("bytes", &T::bytes, kBytes, "Pages held."),
      Gauge("memory_bytes", &T::memory_bytes, kBytes, "Memory taken for them."),
      Gauge("share_bytes", &T::share_bytes, kBytes, "What the tenant may always have."),
      Gauge("pinned_bytes", &T::pinned_bytes, kBytes,
            "Pages that are read in place now; one held twice counts twice."),
      Counter("hits", &T::hits, kNone, "Pages found in the tier."),
      Counter("misses", &T::misses, kNone, "Pages read from the disk instead."),
      Counter("evictions", &T::evictions, kNone, "Pages that left the tier for others."),
  };
}();
static_assert(std::tuple_size_v<decltype(kStatistics<HostTierTenant>)> ==
              FieldCount<HostTierTenant>());

template <>
inline constexpr auto kStatistics<MemoryOfKind> = [] {
  using enum StatisticUnit;
  using M = MemoryOfKind;
  return std::tuple{
      Word("kind", &M::kind, "What the memory is for.", StatisticKind::kLabel),
      Gauge("bytes", &M::bytes, kBytes, "Taken."),
  };
}();
static_assert(std::tuple_size_v<decltype(kStatistics<MemoryOfKind>)> == FieldCount<MemoryOfKind>());

template <>
inline constexpr auto kStatistics<MemoryOfTenant> = [] {
  using enum StatisticUnit;
  using M = MemoryOfTenant;
  return std::tuple{
      Word("tenant", &M::tenant, "The tenant.", StatisticKind::kLabel),
      Gauge("bytes", &M::bytes, kBytes, "Taken, beside the host tier."),
      Gauge("capacity", &M::capacity, kBytes, "Its bound (store.tenant_memory_percent)."),
      Gauge("host_tier_bytes", &M::host_tier_bytes, kBytes, "Taken in the host tier."),
      Counter("refused", &M::refused, kNone, "Calls refused for lack of memory."),
  };
}();
static_assert(std::tuple_size_v<decltype(kStatistics<MemoryOfTenant>)> ==
              FieldCount<MemoryOfTenant>());

template <>
inline constexpr auto kStatistics<TenantStats> = [] {
  using enum StatisticUnit;
  using T = TenantStats;
  return std::tuple{
      Word("tenant", &T::tenant, "The tenant.", StatisticKind::kLabel),
      Gauge("bytes", &T::bytes, kBytes, "Stored on disk."),
      Gauge("reserved_bytes", &T::reserved_bytes, kBytes, "Promised to puts under way."),
      Gauge("quota_bytes", &T::quota_bytes, kBytes, "Quota. 0: none."),
      Counter("evictions", &T::evictions, kNone, "Segments evicted."),
      Counter("evicted_bytes", &T::evicted_bytes, kBytes, "Bytes of segments evicted."),
  };
}();
static_assert(std::tuple_size_v<decltype(kStatistics<TenantStats>)> == FieldCount<TenantStats>());

template <>
inline constexpr auto kStatistics<RuntimeStats> = [] {
  using enum StatisticUnit;
  using R = RuntimeStats;
  return std::tuple{
      Word("version", &R::version, "Version of the library that runs the store."),
      Word("compute", &R::compute,
           "What computes: cpu, cuda and the device, or cpu and the device for questions.")
          .Titled("compute"),
      Word("io_backend", &R::io_backend, "How files are read and written.").Titled("file I/O"),
      Gauge("uptime_ms", &R::uptime_ms, kMilliseconds, "Time since the store was opened."),
      Gauge("models", &R::models, kNone, "Registered models.").Titled("models"),
      Gauge("prefixes", &R::prefixes, kNone, "Stored prefixes.").Titled("prefixes"),
      Gauge("sessions", &R::sessions, kNone, "Attached sessions.").Titled("sessions"),
      Counter("sessions_total", &R::sessions_total, kNone, "Sessions attached so far."),
      Counter("steps", &R::steps, kNone, "Steps of a layer."),
      Gauge("models_bytes", &R::models_bytes, kBytes,
            "Memory of the registered models and their feature maps."),
      Counter("models_dropped", &R::models_dropped, kNone,
              "Models without prefixes that made room for new ones (limits.max_models)."),
      Counter("steps_joined", &R::steps_joined, kNone,
              "Calls that waited for cores and were run together with others."),
      Counter("own_moves", &R::own_moves, kNone,
              "Times that own tokens of a session moved to the store (own_memory_tokens)."),
      Counter("own_moved_tokens", &R::own_moved_tokens, kTokens, "Own tokens that moved."),
      Counter("own_moves_failed", &R::own_moves_failed, kNone,
              "Times that own tokens could not move, and stayed in memory until another attempt."),
      Counter("steps_stopped", &R::steps_stopped, kNone,
              "Times that a call of steps stopped for another tenant's."),
      Counter("advised_restore", &R::advised_restore, kNone,
              "Matches for which restoring was estimated as the fastest way."),
      Counter("advised_attach", &R::advised_attach, kNone,
              "Matches for which attaching and retrieving was estimated as the fastest way."),
      Counter("advised_recompute", &R::advised_recompute, kNone,
              "Matches for which computing the prompt again was estimated as the fastest way."),
      Gauge("bytes_on_disk", &R::bytes_on_disk, kBytes, "What the store takes on disk.")
          .Titled("on disk"),
      Gauge("bytes_free", &R::bytes_free, kBytes, "Free space of the file system.")
          .Titled("free on disk"),
      Counter("bytes_written", &R::bytes_written, kBytes,
              "Written to segments and derived data, rewriting included."),
      Counter("bytes_read", &R::bytes_read, kBytes, "Read from the disk."),
      Gauge("host_tier_bytes", &R::host_tier_bytes, kBytes, "Pages held in the host tier.")
          .Titled("host tier"),
      Gauge("host_tier_capacity", &R::host_tier_capacity, kBytes,
            "Bound of the host tier (store.host_tier_mib).")
          .Titled("host tier at most"),
      Counter("host_hits", &R::host_hits, kNone, "Pages found in the host tier."),
      Counter("host_misses", &R::host_misses, kNone, "Pages read from the disk instead."),
      Counter("checksum_failures", &R::checksum_failures, kNone,
              "Pages and files that did not verify. They were not returned.")
          .Titled("checksum failures"),
      Counter("puts", &R::puts, kNone, "Puts committed."),
      Counter("puts_aborted", &R::puts_aborted, kNone, "Puts given up."),
      Gauge("ingest_queue", &R::ingest_queue, kNone,
            "Prefixes whose summaries and indexes are to be built.")
          .Titled("ingest queue"),
      Counter("bytes_rewritten", &R::bytes_rewritten, kBytes,
              "Written by reclustering and compaction; in bytes_written too."),
      Counter("reclustered", &R::reclustered, kNone, "Segments reclustered."),
      Counter("compacted", &R::compacted, kNone, "Segments compacted with what they continue."),
      Gauge("rewrite_queue", &R::rewrite_queue, kNone, "Segments to be reclustered or compacted."),
      Gauge("preload_queue", &R::preload_queue, kNone,
            "Heads of attached prefixes that are preloaded."),
      Gauge("prefetch_queue", &R::prefetch_queue, kNone, "Heads whose rows are to be prefetched."),
      Counter("prefetched_bytes", &R::prefetched_bytes, kBytes,
              "Rows prefetched into the host tier (a policy's prefetch)."),
      Counter("prefetch_used_bytes", &R::prefetch_used_bytes, kBytes,
              "The part of prefetched_bytes that a step used."),
      Counter(
          "prefetch_wasted_bytes", &R::prefetch_wasted_bytes, kBytes,
          "The part of prefetched_bytes that left the tier unused, was there already, or found no "
          "room. The rest is there and may be used yet."),
      Gauge("host_tier_pinned", &R::host_tier_pinned, kBytes,
            "Pages of the host tier that are read in place now."),
      Counter("host_evictions", &R::host_evictions, kNone,
              "Pages that left the host tier for others."),
      Gauge("selector_memory_bytes", &R::selector_memory_bytes, kBytes,
            "Indexes and exact keys held for selection. Indexes may exceed the bound.")
          .Titled("selector memory"),
      Gauge("selector_memory_capacity", &R::selector_memory_capacity, kBytes,
            "Its bound (store.selector_memory_mib).")
          .Titled("selector memory at most"),
      Gauge("gathered_rows_bytes", &R::gathered_rows_bytes, kBytes,
            "Copies of the rows of sets that steps share.")
          .Titled("gathered rows"),
      Gauge("gathered_rows_capacity", &R::gathered_rows_capacity, kBytes,
            "Their bound (store.gathered_rows_mib).")
          .Titled("gathered rows at most"),
      Gauge("memory_bytes", &R::memory_bytes, kBytes, "Taken of the memory budget.")
          .Titled("memory"),
      Gauge("memory_capacity", &R::memory_capacity, kBytes, "The memory budget (store.memory_mib).")
          .Titled("memory at most"),
      Counter("memory_refused", &R::memory_refused, kNone, "Calls refused for lack of memory.")
          .Titled("refused for memory"),
      Word("memory_kinds", &R::memory_kinds, "Memory of the budget, by what it is for.",
           StatisticKind::kList)
          .Titled("memory by kind"),
      Word("memory_tenants", &R::memory_tenants,
           "Memory of the budget, by tenant. The daemon shows others' only to admins.",
           StatisticKind::kList)
          .Titled("memory by tenant"),
      Word("host_tier_huge_pages", &R::host_tier_huge_pages,
           "Which huge pages the host tier lies in: hugetlb, transparent, collapsed, or none and "
           "why."),
      Word("host_tier_gpu", &R::host_tier_gpu,
           "Whether the host tier is registered with the CUDA device: off, registered, or why "
           "not."),
      Word("host_tenants", &R::host_tenants, "Parts of the host tier, by tenant.",
           StatisticKind::kList),
      Gauge("quota_bytes", &R::quota_bytes, kBytes, "Quota of the store. 0: none."),
      Counter("evictions", &R::evictions, kNone, "Segments evicted."),
      Counter("evicted_bytes", &R::evicted_bytes, kBytes, "Bytes of segments evicted."),
      Counter("expired", &R::expired, kNone, "Prefixes removed because their time was over."),
      Word("tenants", &R::tenants, "What tenants store. The daemon shows others' only to admins.",
           StatisticKind::kList),
      Counter("scrub_bytes", &R::scrub_bytes, kBytes, "Verified in the background.")
          .Titled("scrub verified"),
      Counter("scrub_damaged", &R::scrub_damaged, kNone,
              "Segments and files that the background verification found damaged.")
          .Titled("scrub damaged"),
      Counter("warmed_bytes", &R::warmed_bytes, kBytes,
              "Rows used last that were read into the host tier after the start.")
          .Titled("warmed up"),
      Gauge(
          "unchecked_segments", &R::unchecked_segments, kNone,
          "Segments that the check of headers and footers behind the start has still to come to."),
      Gauge("verified_since_unix_ms", &R::verified_since_unix_ms, kUnixMs,
            "At or after this moment everything stored was verified or written.")
          .Titled("verified since"),
  };
}();
static_assert(std::tuple_size_v<decltype(kStatistics<RuntimeStats>)> == FieldCount<RuntimeStats>(),
              "every member of RuntimeStats has an entry");

}  // namespace prefixd
