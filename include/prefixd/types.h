// Declares the value types of the runtime's interface, for embedded users, the daemon and its
// clients. They are plain data: no behaviour beyond names, no third-party types.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "prefixd/estimator_variant.h"
#include "prefixd/kv_shape.h"
#include "prefixd/ledger.h"
#include "prefixd/partition.h"
#include "prefixd/selection.h"
#include "prefixd/stored_part.h"

namespace prefixd {

// A model as its user describes it. The identity fields (weights digest, architecture, rope,
// adapter, tokenizer, tenant salt ...) and the geometry make the fingerprint: a prefix is only
// ever matched under the same one.
struct ModelSpec {
  std::string name;
  KvGeometry geometry;
  std::vector<std::pair<std::string, std::string>> identity;
  // Feature maps for the phi estimator, one file per target prefix length; may be empty. Paths are
  // on the machine that runs the store.
  std::vector<std::filesystem::path> feature_maps;
};

struct PutSpec {
  std::string model;
  std::string tenant;  // private per tenant; "" is a tenant of its own
  std::vector<uint32_t> tokens;
  std::string label;  // for people: shown by `prefixctl prefixes list`
  // The least lifetime of the prefix; a put never shortens the lifetime of a stored one.
  bool pinned = false;       // never evicted
  uint64_t ttl_seconds = 0;  // from the commit on; 0: for ever
  // The encoding of rows that this put stores (storage/segment/row_encoding.h); absent:
  // RuntimeOptions::encoding.
  std::optional<RowEncoding> encoding;
  // While another put stores tokens of this prompt that this one would store, too: BeginPut waits
  // so long for its end, and missing() is then what that one left; after that it is kUnavailable if
  // `alone`, and otherwise stores the tokens a second time unless the other commits first. Commit
  // waits as long for the other parts of its put.
  uint32_t wait_ms = 0;
  bool alone = false;
  // The rows are derived: a step below mode full went before them in the engine, or they were
  // computed over derived tokens (SessionInfo::exact_tokens). Derived rows serve those alone who
  // ask for them; a put that continues derived rows is derived, whatever it says.
  bool derived = false;
  // Derived rows that the put continues, instead of storing their tokens again: all, or those of a
  // lineage.
  bool accept_approximate = false;
  std::string lineage;
  // Fewer than all heads make the put a part: puts that are equal but for this and their waiting
  // (wait_ms, alone), with disjoint heads, store one prefix together (prefixd/store.h). A part with
  // heads of one that is under way waits for its end, up to wait_ms; then it is kUnavailable.
  HeadRange heads;
};

// How long a stored prefix stays. An absent member leaves the stored value unchanged.
struct Lifetime {
  std::optional<bool> pinned;           // never evicted
  std::optional<uint64_t> ttl_seconds;  // from now on; 0: for ever
};

// One page of a list. Lists have a fixed order, and an item keeps its place for as long as it
// exists: what is added or removed between two pages neither skips nor repeats others.
struct ListSpec {
  std::string after;   // `next` of the page before; empty: the first page
  uint32_t limit = 0;  // items at most; 0, or more than kMaxListItems: as many as that
  std::optional<std::string> tenant;  // only this one's; absent: all that the caller may see
};
inline constexpr uint32_t kMaxListItems = 1000;

// A match takes exact rows, and derived ones where it says so: all, or those of the session that
// the engine continues, by the lineage that its first derived put returned.
struct MatchSpec {
  std::string model, tenant;
  std::vector<uint32_t> tokens;
  bool accept_approximate = false;
  std::string lineage;
  bool operator==(const MatchSpec&) const = default;
};

struct PrefixMatch {
  std::string prefix;  // id (32 hex digits); empty when nothing matches
  uint32_t n_tokens = 0;
  uint32_t stored_tokens = 0;
  uint32_t exact_tokens = 0;  // the matched tokens before the first derived one
};

// The state of a prefix's blobs, which ingest makes after the commit; rows are durable already.
enum class IngestState : uint8_t { kPending, kRunning, kReady, kFailed };
std::string_view IngestStateName(IngestState state);

// The progress of a put under way: tokens times layers whose rows have arrived, and all it needs.
struct PutProgress {
  uint64_t done = 0, total = 0;
};

// `prefix` names the prefix that holds the prompt; it is longer than the prompt when a longer one
// was stored before. Attach with (prefix, n_tokens), or with the prompt's tokens.
struct PutResult {
  std::string prefix;
  uint32_t n_tokens = 0;       // tokens of the prompt
  uint32_t stored_tokens = 0;  // newly stored by this put
  uint64_t bytes = 0;          // written to disk for rows
  double seconds = 0;          // from BeginPut to durable
  // Encoding of the segment in which the prompt ends, newly stored or found, and the relative error
  // of its encoded rows.
  RowEncoding encoding = RowEncoding::kAsGiven;
  EncodingError encoding_error;
  uint32_t exact_tokens = 0;  // tokens of the prompt before the first derived one
  // Names the derived rows in which the prompt ends, for who continues them: 32 random hex digits
  // that no list shows. Empty where all rows are exact.
  std::string lineage;
};

enum class StepMode : uint8_t {
  kFull = 0,      // exact attention over everything
  kAnchors = 1,   // sinks and tail only
  kRetrieve = 2,  // anchors, retrieved Top-K and an estimate of the remainder
};
std::string_view StepModeName(StepMode mode);  // "full", "anchors", "retrieve"
Result<StepMode> StepModeFromName(std::string_view name);

// A policy decides what a step may read. It is given at attach and may be replaced between steps.
struct StepPolicy {
  StepMode mode = StepMode::kRetrieve;
  // kAuto: the estimator that ingest chose for each layer and KV head on held-out queries of the
  // prefill; without such queries the moment estimator ("untuned"). It travels as a name of
  // estimator_variant.h.
  EstimatorVariant estimator = EstimatorKind::kAuto;
  double budget = 0.02;           // fraction of the prefix per step (docs/mathematics.md)
  std::optional<uint32_t> k;      // fixed K instead of a budget
  uint32_t l_gen = 1;             // generated tokens that share the summary's cost
  std::string selector = "auto";  // "auto", "exact", "codes", "ivf"
  // Steps share retrieved sets ([PrHS]; runtime/step/shared_sets.h): within a block, steps whose
  // queries are alike retrieve once. The tokens that dilation adds are read beyond `k`; the plan of
  // a `budget` includes them, so that the budget holds.
  struct Sharing {
    uint32_t block = 1;       // steps, at most 256; 1: every step retrieves
    double similarity = 0.8;  // cosine of the queries above which they share a set
    uint32_t dilation = 1;    // neighbours to either side of the best third; at most 16
    // The first step of a block shares the previous block's set too, if its query is like the one
    // that retrieved the set. With blocks of 1 a step shares the previous step's set.
    bool across = false;
    bool on() const { return block > 1 || across; }
    bool operator==(const Sharing&) const = default;
  };
  Sharing sharing;
  // In the upper quarter of the layers a step retrieves only tokens from a boundary on, which moves
  // up with the layer ([PrHS], PSAW). The tokens before it stay in the remainder and are
  // estimated.
  struct Window {
    double phi = 1;  // (0, 1]; [PrHS] takes 0.7. 1: all tokens
    double alpha = 1;
    bool on() const { return phi < 1; }
    bool operator==(const Window&) const = default;
  };
  Window window;
  // Rows are prefetched into the host tier for a head's next step, behind all other reading
  // (runtime/prefix/prefetcher.h): the tokens behind and before those that the last step retrieved,
  // nearest first. Prefetch changes times and bytes read, never results.
  struct Prefetch {
    uint32_t forward = 0, back = 0;  // tokens, at most 64; both 0: off
    // Bounds what is prefetched for a step of all layers, in equal parts for its heads; a tenth of
    // the host tier bounds it, too. 4 to 65536.
    uint32_t max_mib = 64;
    bool on() const { return forward > 0 || back > 0; }
    bool operator==(const Prefetch&) const = default;
  };
  Prefetch prefetch;
  // Spreads a step's tokens over layers and heads by the attention mass that each is estimated to
  // miss, instead of evenly; the total never grows.
  bool adaptive = false;
  // Fills StepInfo::missing: each query head's missing mass, certified where the cut is exact.
  bool report_missing = false;
  // Names the estimator for single heads, in place of `estimator`.
  struct Fixed {
    uint32_t layer = 0, kv_head = 0;
    EstimatorVariant estimator = EstimatorKind::kNone;
    bool operator==(const Fixed&) const = default;
  };
  std::vector<Fixed> fixed;
  bool operator==(const StepPolicy&) const = default;
};

struct AttachSpec {
  std::string model;
  std::string tenant;
  std::vector<uint32_t> tokens;  // attaches to their longest stored prefix ...
  std::string prefix;            // ... or to this one, when tokens are empty
  uint32_t n_tokens = 0;         // cuts the prefix here; 0: as long as it matches
  StepPolicy policy;
  bool accept_approximate = false;  // as in MatchSpec; a prefix that is named is refused otherwise
  std::string lineage;
  // Bounds the attach and each call of the session: kDeadlineExceeded beyond it, and the session
  // goes on. 0: none. Over a connection its own bound holds, too (ConnectOptions).
  uint32_t call_timeout_ms = 0;
};

struct SessionInfo {
  uint64_t id = 0;
  std::string model, tenant, prefix;
  uint32_t n_tokens = 0;
  KvGeometry geometry;
  Anchors anchors;
  std::string estimator;  // what was attached: "phi (length 8192)", "moment, untuned", ...
  uint32_t d_phi = 0;     // 0: no phi cache
  double attach_seconds = 0;
  std::vector<StoredPart> parts;  // how the rows are stored; fixed while the session is attached
  // The tokens before the first derived one. Where they are fewer than n_tokens, what the engine
  // computes over the session is derived, whatever the policy.
  uint32_t exact_tokens = 0;
};

// Reports one step, summed over KV heads.
struct StepInfo {
  uint32_t k = 0;                    // largest K used by a head
  Ledger ledger;                     // this call only
  std::vector<uint32_t> k_per_head;  // of the KV heads that stepped; mode kRetrieve
  // Of the query heads that stepped: completion share, Z_R / (Z_E + Z_R) [56]; NaN where no
  // estimator serves the head (unless the policy has `adaptive` or `report_missing`, which estimate
  // it anyway).
  std::vector<float> rho_z;
  std::vector<MissingMass> missing;  // likewise, if the policy has `report_missing`
};

struct SessionReport {
  SessionInfo info;
  Ledger total;
  std::vector<Ledger> per_head;  // by HeadIndex, of info.geometry.heads()
};

struct EstimatorError {
  EstimatorVariant estimator = EstimatorKind::kNone;
  double error = 0;  // mean relative l1 output error on the held-out queries
  bool operator==(const EstimatorError&) const = default;
};

struct HeadChoice {
  uint32_t layer = 0, kv_head = 0;
  EstimatorVariant chosen = EstimatorKind::kNone;
  double budget = 0;
  // Errors of all estimators that the budget can pay for, in order of preference: the chosen one
  // first.
  std::vector<EstimatorError> errors;
  bool operator==(const HeadChoice&) const = default;
};

// The measured recall of a head's index at 1% of the keys, on half of the sampled queries of the
// prefill; the other half tuned the index.
struct IndexRecall {
  uint32_t layer = 0, kv_head = 0;
  std::string index;     // "codes", "ivf"
  uint32_t queries = 0;  // 0: untuned, the put gave no queries to measure with
  uint32_t k = 0;
  double recall = 0;  // recall@k
  double mass = 0;    // attention mass over that of the exact set, worst query head
  double effort = 0;  // ivf: fraction of lists probed; others: keys scored per token returned
  bool used = true;   // false: it misses RuntimeOptions::recall_target, exact search serves
  bool operator==(const IndexRecall&) const = default;
};

struct PrefixSummary {
  std::string id, model, tenant, label;
  uint32_t n_tokens = 0, own_tokens = 0, children = 0;
  uint64_t own_bytes = 0;
  int64_t created_unix_ms = 0, last_used_unix_ms = 0;
  bool quarantined = false;
  bool reclustered = false;     // rows lie by similarity of keys
  bool pinned = false;          // never evicted
  int64_t expires_unix_ms = 0;  // 0: never
  std::string quarantine;       // the reason
  IngestState ingest = IngestState::kPending;
  std::string ingest_error;
  RowEncoding encoding = RowEncoding::kAsGiven;  // for the rows of its own tokens
  EncodingError encoding_error;                  // the error of these rows
  uint32_t exact_tokens = 0;                     // those before the first derived one
};

struct PrefixDetail {
  PrefixSummary summary;
  std::vector<std::string> chain;  // root first
  std::vector<std::string> blobs;  // derived data stored beside the segment
  std::vector<HeadChoice> choices;
  std::vector<IndexRecall> indexes;  // for the segment in which the prefix ends
};

// A page may have fewer items than asked for, where they are large. `next` is empty behind the
// last.
struct PrefixPage {
  std::vector<PrefixSummary> prefixes;  // by tenant and id
  std::string next;
};
struct ModelPage {
  std::vector<ModelSpec> models;  // by name
  std::string next;
};

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
  std::string version, compute;  // compute: "cpu" or "cuda: <device>"
  std::string io_backend;
  uint64_t uptime_ms = 0;
  uint64_t models = 0, prefixes = 0, sessions = 0, sessions_total = 0, steps = 0;
  // What models take in memory, and models that made room for new ones.
  uint64_t models_bytes = 0, models_dropped = 0;
  uint64_t steps_joined = 0;  // calls that waited for cores and ran together with others
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
  int64_t verified_since_unix_ms = 0;
};

inline constexpr uint32_t kMaxStatTenants = 1000;

struct VerifySummary {
  uint64_t segments = 0, pages = 0, blobs = 0, bytes = 0;
  std::vector<std::string> damaged;
  std::vector<std::string> covered;  // ids of the segments that were read, each once
};

using ProgressFn = std::function<bool(uint64_t done, uint64_t total, std::string_view unit)>;

}  // namespace prefixd
