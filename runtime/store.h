// The runtime: storage, index, attention and gpu joined in one process. This is all of prefixd;
// the daemon is this library plus a socket.
//
// Thread-safety: Store and Session methods may be called concurrently, except that one PutStream
// is used by one thread at a time. A Session, a PutStream keep their Store alive (shared state);
// destroying the Store waits for background work.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "attention/estimator_variant.h"
#include "attention/result.h"
#include "runtime/session.h"
#include "runtime/types.h"

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
  uint64_t shared_rows_bytes = 512ull << 20;
  uint64_t min_free_bytes = 256ull << 20;
  uint32_t read_deadline_ms = 30000;  // of reading rows from the disk; then kUnavailable. 0: none
  uint64_t quota_bytes = 0;           // 0: none
  uint64_t tenant_quota_bytes = 0;    // of each tenant, 0: none ...
  std::map<std::string, uint64_t> tenant_quotas;  // ... save these, in bytes
  // Of rows of puts that name none: "as_given", or "int8" for half of bf16's space and reading, at
  // the error that PutResult reports.
  std::string encoding = "as_given";
  // When a put does not fit: "worth" evicts what is worth the least (storage/eviction.h), "never"
  // refuses the put.
  std::string evict = "worth";
  uint32_t maintenance_ms = 10'000;   // period of the background sweep (expiry, headroom)
  uint32_t threads = 0;               // compute threads; 0: one per core
  std::string compute = "auto";       // "auto", "cpu", "cuda"
  Anchors anchors;                    // of every session: summaries are built for them
  uint32_t checkpoint_tokens = 4096;  // spacing of a segment's cumulative summaries
  // The estimators that are built and compared for every head (attention/estimator_variant.h). The
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
  // Heads whose index finds less of what exact search would return are searched exactly; above 1:
  // all are.
  double recall_target = 0.95;
  bool build_ivf = false;  // FAISS IVF for segments of at least ivf_min_tokens
  uint32_t ivf_min_tokens = 16384;
  // FAISS HNSW, for prefixes that are kept long: minutes of build per head and 100k tokens.
  bool build_hnsw = false;
  uint32_t hnsw_min_tokens = 16384;
  bool build_pages = false;  // bounds of pages of keys: the cheapest index
  uint32_t pages_min_tokens = 4096;
  // Rewriting in the background: segments of at least settle_min_tokens are settled (rows that are
  // retrieved together share pages), small ones merged with what they continue as long as together
  // they have at most merge_max_tokens. 0 and false: never.
  bool settle = true;
  uint32_t settle_min_tokens = 2048;
  uint32_t settle_chunk_tokens = 16384;  // rows move only within a chunk; at most 65536
  uint32_t merge_max_tokens = 8192;
  uint32_t max_sessions = 1024;
  uint64_t scrub_bytes_per_second = 32ull << 20;  // of the background verification; 0: none
  uint32_t scrub_interval_hours = 168;            // everything is verified at least so often
};

// One put: rows stream in layer by layer (or in any order), so that it overlaps with the prefill.
// Destroyed without Commit: aborted, nothing visible, nothing leaked.
class PutStream {
 public:
  virtual ~PutStream() = default;
  // Tokens that are not stored yet: only these need rows; others are ignored.
  virtual TokenRange missing() const = 0;
  // k: [n][n_kv_heads][key_dim], v: [n][n_kv_heads][value_dim], in the geometry's dtype, for tokens
  // [first, first + n) of `layer`. Borrowed for the call. Tokens outside missing() are skipped.
  // kInvalidArgument: sizes, NaN or Inf (named by layer and token), tokens written before. Nothing
  // of a refused run was written; a remote run that takes several messages may have been written up
  // to the one refused, as progress() says. The put can go on, or be aborted.
  virtual Status Write(uint32_t layer, uint32_t first, uint32_t n, std::span<const std::byte> k,
                       std::span<const std::byte> v) = 0;
  // How much of missing() was written. Commit asks for all of it.
  virtual PutProgress progress() const = 0;
  // Optional: the prefill's own queries q [n][n_q_heads][key_dim] float32 of tokens
  // [first, first + n). A reservoir of them is kept to choose estimators per head.
  virtual Status WriteQueries(uint32_t layer, uint32_t first, uint32_t n,
                              std::span<const float> q) = 0;
  // Durable and visible when it returns. Summaries and indexes follow in the background
  // (Store::WaitReady).
  virtual Result<PutResult> Commit() = 0;
  virtual void Abort() = 0;
};

class Store {
 public:
  static Result<std::unique_ptr<Store>> Open(const RuntimeOptions& options);
  virtual ~Store() = default;

  // Idempotent for an equal spec; new feature maps replace the old ones (phi caches are rebuilt).
  virtual Status RegisterModel(const ModelSpec& spec) = 0;
  virtual std::vector<ModelSpec> Models() const = 0;

  virtual Result<std::unique_ptr<PutStream>> BeginPut(const PutSpec& spec) = 0;
  virtual Result<PrefixMatch> Match(std::string_view model, std::string_view tenant,
                                    std::span<const uint32_t> tokens) const = 0;
  // Waits until the prefix's summaries, indexes and choices are ready, or says why not.
  virtual Status WaitReady(std::string_view prefix, const ProgressFn& progress) = 0;
  // Waits until the background has nothing left to rewrite. For benchmarks and tests.
  virtual Status WaitSettled(const ProgressFn& progress) = 0;

  // kNotFound when no stored prefix matches.
  virtual Result<std::shared_ptr<Session>> Attach(const AttachSpec& spec) = 0;

  virtual std::vector<PrefixSummary> Prefixes() const = 0;
  virtual Result<PrefixDetail> Prefix(std::string_view prefix) const = 0;
  virtual Status Remove(std::string_view prefix) = 0;
  // Durable when it returns. kNotFound when the prefix was removed or has expired.
  virtual Status SetRetention(std::string_view prefix, const Retention& retention) = 0;
  // prefix "": everything.
  virtual Result<VerifySummary> Verify(std::string_view prefix, const ProgressFn& progress) = 0;
  virtual RuntimeStats stats() const = 0;
};

// One layer step of each of several sessions (they may stand on different prefixes and models).
struct StepRequest {
  Session* session = nullptr;
  uint32_t layer = 0;
  std::span<const float> q;  // [n_q_heads][key_dim]
  std::span<float> y;        // [n_q_heads][value_dim]
  std::span<float> lse;      // [n_q_heads]
  StepInfo* info = nullptr;  // optional
  Status status;             // out: of this request alone
};
// Runs all of them together: selection, reads and attention of every (session, KV head) are spread
// over the store's compute threads, and sessions on one prefix are searched for in one pass over
// its codes; each gets what it would get alone. Calls of several threads that wait for the same
// cores are joined likewise. All sessions must belong to one Store.
void StepBatch(std::span<StepRequest> requests);

}  // namespace prefixd
