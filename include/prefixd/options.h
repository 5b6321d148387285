// Declares the options of an embedded store; the daemon's configuration has the same ones
// (docs/reference.md). base/tables/runtime_options.cc has name, unit, bounds and help of each.
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

// The default reaches from no summary at all to the whole covariance C, so that every budget can
// pay for some of them; estimator_bench compares others.
std::vector<EstimatorVariant> DefaultEstimators();

// A part of the memory that follows from RuntimeOptions::memory_bytes.
inline constexpr uint64_t kByMemory = UINT64_MAX;
// Free space that follows from the size of the file system (RuntimeOptions::min_free_bytes).
inline constexpr uint64_t kByDisk = UINT64_MAX;

struct RuntimeOptions {
  std::filesystem::path dir;
  std::string io = "auto";  // "auto", "uring", "threads"
  // Bounds all memory of the store (base/memory_budget.h). 0: half of what the machine, or the
  // control group of the process, has.
  uint64_t memory_bytes = 0;
  // The fraction of it that a tenant may hold beside the host tier.
  double tenant_memory_share = 0.75;
  uint64_t host_tier_bytes = kByMemory;
  // The fractions of the host tier that named tenants may always have; the other tenants share the
  // rest equally.
  std::vector<std::pair<std::string, double>> host_tier_shares;
  bool host_tier_hugetlb = false;  // taken from the system's pool of huge pages, if it has one
  bool host_tier_mlock = false;    // never swapped out
  bool pin_host_tier = false;      // registered with the CUDA device, if there is one
  // After the store is opened, rows of the prompts used last are read into the host tier in the
  // background, as far as it has room. The daemon does so by default.
  bool warm_up = false;
  // Bounds the memory of selection, over all prefixes that sessions hold. Indexes are always in
  // memory and count first; exact keys are held as far as there is room, prefix by prefix, and are
  // otherwise read where they lie.
  uint64_t selector_memory_bytes = kByMemory;
  // Bounds the gathered-row cache of all sessions (StepPolicy::Sharing).
  uint64_t gathered_rows_bytes = kByMemory;
  // What no put takes of the disk. kByDisk: a twentieth of the file system, from 256 MiB to 16 GiB.
  uint64_t min_free_bytes = kByDisk;
  uint32_t read_deadline_ms = 30000;  // per read of rows from disk; then kUnavailable. 0: none
  uint64_t quota_bytes = 0;           // 0: none
  uint64_t tenant_quota_bytes = 0;    // for each tenant that tenant_quotas does not name; 0: none
  std::map<std::string, uint64_t> tenant_quotas;  // bytes, by tenant
  // A file of master keys, one of 64 hex digits a line, the newest first, which its owner alone may
  // read: all that lies on the disk of a prompt is encrypted (docs/security.md). Empty: in clear.
  std::string encryption_key_file;
  // The encoding of rows for puts that name none: "as_given", or "int8", which halves the space and
  // the bytes read of bf16, at the error that PutResult reports.
  std::string encoding = "as_given";
  // A file of scorers that `python -m prefixd.retention --train` wrote, or a folder of such files,
  // one for each model: for sessions that retain own tokens by "kvpop". Empty: none do.
  std::string scorers;
  // When a put does not fit, "score" evicts the segments with the least eviction score
  // (storage/catalog/eviction.h), and "never" refuses the put.
  std::string evict = "score";
  uint32_t maintenance_ms = 10'000;   // period of the background sweep (expiry, headroom)
  uint32_t threads = 0;               // compute threads; 0: one per core
  std::string compute = "auto";       // "auto", "cpu", "cuda"
  Anchors anchors;                    // the same for every session, as summaries leave them out
  uint32_t checkpoint_tokens = 4096;  // spacing of a segment's cumulative summaries
  // Ingest builds and compares these estimators for every head (prefixd/estimator_variant.h), and
  // always builds the plain moment.
  std::vector<EstimatorVariant> estimators = DefaultEstimators();
  // The format of features of single tokens, which are stored for models with feature maps so that
  // steps need not recompute them: "none", "u8", "u16", "log8", "log16"; "auto": log8 if steps are
  // computed on the CPU, none on CUDA.
  std::string phi_features = "auto";
  uint32_t clusters = 32;  // per segment and head, for estimators that use clusters
  // Ingest and what follows it begin when a session attaches that reads less than everything, or
  // somebody waits for the prefix to be ready; false: behind each put. For engines that only bring
  // rows back, to which codes, summaries and reclustered rows are work and writes for nothing.
  bool defer_ingest = false;
  // How much of a core ingest and rewriting take, all together, while others want the cores and
  // nobody waits for them, in per cent. 100: what the scheduler gives them.
  uint32_t busy_percent = 3;
  uint32_t query_samples = 32;  // per layer, stored from the last quarter of a prefill
  std::vector<double> choice_budgets = {0.005, 0.01, 0.02, 0.03, 0.05, 0.1};
  bool build_codes = true;  // compact codes for segments of at least codes_min_tokens
  uint32_t codes_min_tokens = 4096;
  // A head whose index has less recall than this is searched exactly; 1.01: every head is.
  double recall_target = 0.95;
  bool build_ivf = false;  // FAISS IVF for segments of at least ivf_min_tokens
  uint32_t ivf_min_tokens = 16384;
  // The background rewrites segments: those of at least recluster_min_tokens are reclustered (rows
  // that are retrieved together share pages), small ones are compacted with the ones they continue
  // as long as together they have at most compact_max_tokens. 0 and false: never.
  bool recluster = true;
  uint32_t recluster_min_tokens = 2048;
  uint32_t recluster_chunk_tokens = 16384;  // rows move only within a chunk; at most 65536
  uint32_t compact_max_tokens = 8192;
  uint32_t max_sessions = 1024;
  // Bound the registered models, their feature maps in memory included. A model that nothing is
  // stored for makes room for a new one.
  uint32_t max_models = 256;
  uint64_t max_models_bytes = 1ull << 30;
  uint64_t scrub_bytes_per_second = 32ull << 20;  // 0: no scrub
  uint32_t scrub_interval_hours = 168;            // the scrub verifies everything once in this time
};

}  // namespace prefixd
