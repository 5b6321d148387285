#include "base/tables/runtime_options.h"

#include <array>
#include <utility>

#include "base/tables/field_count.h"

namespace prefixd {

std::vector<EstimatorVariant> DefaultEstimators() {
  return std::move(ParseVariants("none, moment, moment/r2, moment/r8, scan, phi")).value();
}

std::vector<Option> OptionsOf(RuntimeOptions& o) {
  constexpr uint64_t kTebi = 1ull << 20;  // MiB in a TiB
  constexpr OptionUnit kTokens{"tokens"}, kHours{"hours"}, kMs{"milliseconds"};
  std::array options = {
      Plain("dir", "dir", &o.dir, "path",
            "Directory of the store. Created if missing (its parent must exist); one daemon at a "
            "time."),

      Choice("io", "store.io", &o.io, {"auto", "uring", "threads"},
             "How files are read and written: io_uring where the kernel allows it, or threads."),
      Number("memory_bytes", "store.memory_mib", &o.memory_bytes, kMib, {0, 16 * kTebi},
             "All memory of the store and its daemon; the parts below follow from it. 0: half of "
             "what the machine or the control group has.")
          .WithFlag("memory"),
      Number("tenant_memory_share", "store.tenant_memory_percent", &o.tenant_memory_share, kPercent,
             {1, 100}, "The part of it that one tenant may hold beside the host tier."),
      Number("host_tier_bytes", "store.host_tier_mib", &o.host_tier_bytes, kMib, {0, 16 * kTebi},
             "Bound of the host-memory tier: verified pages kept in memory.")
          .OrAuto(),
      Plain("host_tier_shares", "store.host_tier_shares", &o.host_tier_shares,
            "fractions by tenant",
            "Parts of the host tier that tenants may always have: { team-a = 0.5 }. The others "
            "share the rest equally."),
      Switch("host_tier_hugetlb", "store.host_tier_hugetlb", &o.host_tier_hugetlb,
             "Take the host tier from the system's pool of huge pages (vm.nr_hugepages), if it has "
             "one."),
      Switch("host_tier_mlock", "store.host_tier_mlock", &o.host_tier_mlock,
             "Never swap the host tier out. Needs a memlock limit (ulimit -l) of its size."),
      Switch("pin_host_tier", "store.pin_host_tier", &o.pin_host_tier,
             "Register the host tier with the CUDA device, so that it reads rows at the bus's "
             "speed. Without one the log says so and all else goes on."),
      Switch("warm_up", "store.warm_up", &o.warm_up,
             "After a start, read rows of the prompts used last into the host tier, as far as it "
             "has room, behind all other work."),
      Number("selector_memory_bytes", "store.selector_memory_mib", &o.selector_memory_bytes, kMib,
             {0, 16 * kTebi},
             "Memory for selection: indexes first, exact keys of attached prefixes as far as there "
             "is room.")
          .OrAuto(),
      Number("gathered_rows_bytes", "store.gathered_rows_mib", &o.gathered_rows_bytes, kMib,
             {0, 16 * kTebi},
             "Memory for copies of the rows that steps share (sharing), of all sessions.")
          .OrAuto(),
      Number("min_free_bytes", "store.min_free_mib", &o.min_free_bytes, kMib, {0, 16 * kTebi},
             "No put leaves less free space on the disk; reading goes on. auto: a twentieth of the "
             "file system, from 256 MiB to 16 GiB.")
          .OrAuto(),
      Number("quota_bytes", "store.quota_mib", &o.quota_bytes, kMib, {0, 1024 * kTebi},
             "Bound of what the store takes on disk. 0: none."),
      Number("read_deadline_ms", "store.read_deadline_ms", &o.read_deadline_ms, kMs, {0, 3'600'000},
             "Rows the disk has not delivered by then fail as unavailable. 0: wait as long as it "
             "takes."),
      Number("tenant_quota_bytes", "store.tenant_quota_mib", &o.tenant_quota_bytes, kMib,
             {0, 1024 * kTebi},
             "The same bound for each tenant that has none of its own. 0: none."),
      Number(
          "tenant_quotas", "store.tenant_quotas_mib", &o.tenant_quotas, {"MiB by tenant", 1 << 20},
          {0, 1024 * kTebi},
          "Quotas of single tenants, instead of tenant_quota_mib: { team-a = 4096, team-b = 0 }."),
      Plain("encryption_key_file", "store.encryption_key_file", &o.encryption_key_file, "path",
            "File (mode 0600) of keys that everything is encrypted under on the disk; `prefixctl "
            "key new` makes one. Who loses it loses what is stored. Empty: in clear."),
      Choice("encoding", "store.encoding", &o.encoding, {"as_given", "int8"},
             "How the rows of puts that do not say are stored. int8: half of bf16's bytes, at an "
             "error that each put reports."),
      Plain("scorers", "store.scorers", &o.scorers, "path",
            "File of trained scorers, or a folder of such files, one for each model: for sessions "
            "that retain own tokens by kvpop."),
      Choice("evict", "store.evict", &o.evict, {"score", "never"},
             "What happens to a put that does not fit: the prefixes with the lowest score make "
             "room, or it is refused."),
      Number(
          "maintenance_ms", "store.maintenance_ms", &o.maintenance_ms, kMs, {1, 3'600'000},
          "Period of the background sweep: expired prefixes go, and room is kept ahead of puts."),
      Switch("recluster", "store.recluster", &o.recluster,
             "Rewrite long segments in the background, so that rows retrieved together share "
             "pages."),
      Number("recluster_min_tokens", "store.recluster_min_tokens", &o.recluster_min_tokens, kTokens,
             {1, 1u << 31}, "Segments of at least so many tokens are reclustered."),
      Number("recluster_chunk_tokens", "store.recluster_chunk_tokens", &o.recluster_chunk_tokens,
             kTokens, {1, 65536}, "Reclustering moves rows only within a chunk of so many tokens."),
      Number("compact_max_tokens", "store.compact_max_tokens", &o.compact_max_tokens, kTokens,
             {0, 1u << 31},
             "Small segments are compacted with the ones that they continue, up to so many tokens. "
             "0: never."),

      Number("scrub_bytes_per_second", "scrub.mib_per_second", &o.scrub_bytes_per_second,
             {"MiB per second", 1 << 20}, {0, 1 << 20},
             "Pace at which everything stored is verified in the background. 0: not at all.")
          .WithFlag("scrub-mib-per-second"),
      Number("scrub_interval_hours", "scrub.interval_hours", &o.scrub_interval_hours, kHours,
             {1, 87600},
             "Every segment is verified at least this often, as far as the pace allows.")
          .WithFlag("scrub-interval-hours"),

      Choice(
          "compute", "compute.backend", &o.compute, {"auto", "cpu", "cuda"},
          "Where attention is computed. auto: steps on the CPU, which has the rows, and exact "
          "attention of a question's tokens on a CUDA device when there is one. cuda: both there.")
          .WithFlag("compute"),
      Number("threads", "compute.threads", &o.threads, {"threads"}, {0, 1024},
             "Compute threads. 0: one per core."),

      Number("n_sink", "ingest.n_sink", &o.anchors.n_sink, kTokens, {0, 4096},
             "Anchors at the beginning of every prefix: always read exactly."),
      Number("n_tail", "ingest.n_tail", &o.anchors.n_tail, kTokens, {0, 4096},
             "Anchors at the end of every prefix: always read exactly."),
      Number("checkpoint_tokens", "ingest.checkpoint_tokens", &o.checkpoint_tokens, kTokens,
             {16, 1048576}, "Spacing of the cumulative summaries of a segment."),
      Plain("estimators", "ingest.estimators", &o.estimators, "names",
            "Estimators of what is not read, built and compared for every head "
            "(docs/mathematics.md). The plain moment is always built."),
      Choice("phi_features", "ingest.phi_features", &o.phi_features,
             {"auto", "none", "u8", "u16", "log8", "log16"},
             "Features of tokens kept for models with feature maps, instead of recomputing them. "
             "auto: log8 where steps are computed on the CPU, none on CUDA."),
      Number("clusters", "ingest.clusters", &o.clusters, {"per segment and head"}, {1, 4096},
             "Clusters of keys, for the estimators that go by clusters."),
      Switch("defer_ingest", "ingest.defer", &o.defer_ingest,
             "Make codes and summaries of a prefix when a session first attends to it, instead of "
             "behind its put. For engines that only load what is stored.")
          .WithFlag("defer-ingest"),
      Number("busy_percent", "ingest.busy_percent", &o.busy_percent, {"per cent of a core"},
             {1, 100},
             "What ingest and rewriting take together while other programs want the cores and "
             "nobody waits "
             "for them. 100: what the scheduler gives them."),
      Number("query_samples", "ingest.query_samples", &o.query_samples, {"queries per layer"},
             {0, 4096}, "Queries of a prefill kept to choose estimators and measure them."),
      Plain("choice_budgets", "ingest.choice_budgets", &o.choice_budgets, "fractions of the prefix",
            "Budgets at which estimators are compared for every head."),
      Switch("build_codes", "ingest.build_codes", &o.build_codes,
             "Build compact codes of the keys, by which steps find what to read."),
      Number("codes_min_tokens", "ingest.codes_min_tokens", &o.codes_min_tokens, kTokens,
             {1, 1u << 30}, "Segments shorter than this get no codes: exact search is as fast."),
      Number("recall_target", "ingest.recall_percent", &o.recall_target, kPercent, {0, 101},
             "Heads whose index finds less of what exact search would return are searched exactly. "
             "101: all of them are."),
      Switch("build_ivf", "ingest.build_ivf", &o.build_ivf,
             "Build FAISS IVF indexes too, for policies that ask for ivf."),
      Number("ivf_min_tokens", "ingest.ivf_min_tokens", &o.ivf_min_tokens, kTokens, {1, 1u << 30},
             "Segments shorter than this get no IVF index: exact search is as fast."),

      Number("max_sessions", "limits.max_sessions", &o.max_sessions, {"sessions"}, {1, 1u << 20},
             "Sessions attached at one time, all connections together."),
      Number("max_models", "limits.max_models", &o.max_models, {"models"}, {1, 65536},
             "Registered models. One that nothing is stored for makes room for a new one."),
      Number("max_models_bytes", "limits.models_mib", &o.max_models_bytes, kMib, {1, kTebi},
             "What registered models take in memory, feature maps included."),
  };
  // Anchors have an option for each of their own members.
  static_assert(
      options.size() == FieldCount<RuntimeOptions>() - 1 + FieldCount<decltype(o.anchors)>(),
      "every member of RuntimeOptions has an entry");
  return {options.begin(), options.end()};
}

Status CheckOptions(RuntimeOptions options) {
  for (const Option& option : OptionsOf(options)) PREFIXD_TRY(CheckOption(option));
  return {};
}

}  // namespace prefixd
