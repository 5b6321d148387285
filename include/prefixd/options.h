// The options of a store of one's own; the daemon's configuration is made of the same
// (docs/reference.md). base/runtime_options.cc has name, unit, bounds and meaning of each.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "prefixd/estimator_variant.h"
#include "prefixd/partition.h"

namespace prefixd {

// From nothing to all of C, so that every budget can pay for some; estimator_bench compares others.
std::vector<EstimatorVariant> DefaultEstimators();

struct RuntimeOptions {
  std::filesystem::path dir;
  std::string io = "auto";  // "auto", "uring", "threads"
  uint64_t host_tier_bytes = 1ull << 30;
  // Fractions of it that tenants may always have, by name; the others share the rest equally.
  std::vector<std::pair<std::string, double>> host_tier_shares;
  bool host_tier_hugetlb = false;  // from the system's pool of huge pages, where it has one
  bool host_tier_mlock = false;    // never swapped out
  bool pin_host_tier = false;      // registered with the CUDA device, where there is one
  // For selection, of all prefixes that sessions hold: indexes are always in memory and counted
  // first; exact keys are held as far as there is room, prefix by prefix, else read where they lie.
  uint64_t selector_memory_bytes = 1ull << 30;
  // For copies of the rows of sets that steps share, of all sessions (StepPolicy::Sharing).
  uint64_t gathered_rows_bytes = 512ull << 20;
  uint64_t min_free_bytes = 256ull << 20;
  uint32_t read_deadline_ms = 30000;  // of reading rows from the disk; then kUnavailable. 0: none
  uint64_t quota_bytes = 0;           // 0: none
  uint64_t tenant_quota_bytes = 0;    // of each tenant, 0: none ...
  std::map<std::string, uint64_t> tenant_quotas;  // ... save these, in bytes
  // Of rows of puts that name none: "as_given", or "int8" for half of bf16's space and reading, at
  // the error that PutResult reports.
  std::string encoding = "as_given";
  // When a put does not fit: "score" evicts what is worth the least (storage/catalog/eviction.h),
  // "never" refuses the put.
  std::string evict = "score";
  uint32_t maintenance_ms = 10'000;   // period of the background sweep (expiry, headroom)
  uint32_t threads = 0;               // compute threads; 0: one per core
  std::string compute = "auto";       // "auto", "cpu", "cuda"
  Anchors anchors;                    // of every session: summaries are built for them
  uint32_t checkpoint_tokens = 4096;  // spacing of a segment's cumulative summaries
  // The estimators that are built and compared for every head (prefixd/estimator_variant.h). The
  // plain moment is always built.
  std::vector<EstimatorVariant> estimators = DefaultEstimators();
  // Features of single tokens, kept for models with feature maps, so that steps read them instead
  // of recomputing them: "none", "u8", "u16", "log8", "log16"; "auto": log8 where steps are
  // computed on the CPU, none on CUDA.
  std::string phi_features = "auto";
  uint32_t clusters = 32;       // of keys, per segment and head, for those by clusters
  uint32_t query_samples = 32;  // per layer, kept from the last quarter of a prefill
  std::vector<double> choice_budgets = {0.01, 0.02, 0.03, 0.04, 0.05};
  bool build_codes = true;  // compact codes for segments of at least codes_min_tokens
  uint32_t codes_min_tokens = 4096;
  // Heads whose index finds less of what exact search would return are searched exactly; 1.01: all
  // are.
  double recall_target = 0.95;
  bool build_ivf = false;  // FAISS IVF for segments of at least ivf_min_tokens
  uint32_t ivf_min_tokens = 16384;
  // Rewriting in the background: segments of at least recluster_min_tokens are reclustered (rows
  // that are retrieved together share pages), small ones compacted with what they continue as long
  // as together they have at most compact_max_tokens. 0 and false: never.
  bool recluster = true;
  uint32_t recluster_min_tokens = 2048;
  uint32_t recluster_chunk_tokens = 16384;  // rows move only within a chunk; at most 65536
  uint32_t compact_max_tokens = 8192;
  uint32_t max_sessions = 1024;
  uint64_t scrub_bytes_per_second = 32ull << 20;  // of the background verification; 0: none
  uint32_t scrub_interval_hours = 168;            // everything is verified at least so often
};

}  // namespace prefixd
