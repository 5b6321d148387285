// Declares the store: what is kept and where. It knows bytes and rows; it knows no attention.
//
// A stored prefix is a chain of immutable segments (runs of consecutive tokens). A put stores only
// tokens that are not stored yet: its segment hangs below the longest stored prefix of the same
// model and tenant, which may end inside that parent segment. One synced catalog commit makes it
// visible; a put that dies before leaves nothing visible, and recovery at Open frees what it left
// on disk.
//
// Thread-safety: all methods of PrefixStore may be called concurrently; one SegmentWriter is used
// by one thread at a time. Errors: kCorrupt means that stored bytes did not verify and were not
// returned; kResourceExhausted means a full disk or quota (all stored data stays).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/kv_shape.h"
#include "prefixd/partition.h"
#include "prefixd/result.h"
#include "prefixd/snapshot.h"
#include "prefixd/stored_part.h"
#include "storage/core/lifetime_change.h"
#include "storage/core/verify_report.h"
#include "storage/files/store_options.h"
#include "storage/files/tenant_usage.h"
#include "storage/io/progress.h"
#include "storage/remote/remote_tier.h"
#include "storage/segment/gone_record.h"
#include "storage/segment/prefix_info.h"
#include "storage/store/segment_source.h"

namespace prefixd::storage {

struct PutOptions {
  // The prefix's lifetime. A put of tokens that are stored already never shortens it.
  bool pinned = false;
  uint64_t ttl_ms = 0;  // from the commit on; 0: for ever
  // The encoding of the rows that this put stores; rows stored before stay as they are.
  RowEncoding encoding = RowEncoding::kAsGiven;
  // While another put stores blocks of these tokens that this one would store, too: BeginPut waits
  // so long for its end; then it is kUnavailable if `alone`, and goes on otherwise.
  uint64_t wait_ms = 0;
  bool alone = false;
  // The rows are derived. So are those that continue derived rows, whatever is said here.
  bool derived = false;
  // Which stored rows the put continues instead of storing them again. A derived put without a
  // lineage draws one, unless it continues derived rows: then it has theirs.
  Acceptance accept;
  // The rows are own tokens that a session moves (SegmentRecord::live). Their ids are unique in the
  // store, so that nothing else has them.
  bool live = false;
};

// How many bytes of rows lie in the host tier, and how many are read from the disk.
struct RowsHeld {
  uint64_t memory_bytes = 0, disk_bytes = 0;
};

struct Match {
  SegmentId id;                // the segment in which the match ends; meaningless when n_tokens = 0
  uint32_t n_tokens = 0;       // matched down to the token, stored ids compared; 0: nothing stored
  uint32_t stored_tokens = 0;  // tokens of the prefix `id` (>= n_tokens)
  uint32_t exact_tokens = 0;   // the matched tokens before the first derived one
  bool compressed = false;     // of some of its tokens no rows are stored
};

// Says why a match ends where it does: what is stored behind it and not used, and what was.
struct MatchExplanation {
  Match match;
  // The token that the nearest stored prefix has where the match ends; absent: it ends there, too,
  // or nothing matches.
  std::optional<uint32_t> stored_token;
  uint32_t derived_tokens = 0;  // the tokens that match when derived rows are taken, if more
  // The same where compressed segments are taken; the segment in which that match ends.
  uint32_t compressed_tokens = 0;
  SegmentId compressed;
  // A stored prefix that holds more tokens of the prompt but serves nobody, and why.
  struct Unusable {
    SegmentId id;
    uint32_t n_tokens = 0;        // down to a whole block
    std::string quarantine;       // the reason; empty: it expired
    int64_t expires_unix_ms = 0;  // when it did
  };
  std::vector<Unusable> unusable;
  // What held, or would have held, the most tokens more than the match.
  std::optional<GoneRecord> gone;
  uint32_t gone_tokens = 0;  // at least so many tokens of the prompt
};

// Where a list of prefixes begins and ends. Prefixes are in the order of tenant and id.
struct PrefixesAfter {
  std::string tenant;  // with `id`: the first one behind this
  SegmentId id;
  size_t limit = SIZE_MAX;
  bool one_tenant = false;  // none of the tenants behind `tenant`
};

struct WarmUpOptions {
  const std::atomic<bool>* stop = nullptr;  // ends it soon after it is set, with kCancelled
  std::function<void()> rest;               // called between reads; may sleep
};

// What a warm-up has read into the host tier.
struct WarmedUp {
  uint64_t prefixes = 0, bytes = 0;
};

struct ScrubOptions {
  uint64_t bytes_per_second = 32ull << 20;    // above 0
  int64_t interval_ms = 7ll * 24 * 3600'000;  // how long a segment counts as verified
  // Sleeps for the given time (0: not at all). False: stop now.
  std::function<bool(std::chrono::nanoseconds)> wait;
};

// Returns the order in which the rows of one chunk are stored: slot s holds row order[s] of `rows`
// ([n][row bytes], in the geometry's dtype, borrowed), tokens [first, first + n).
using RowOrderFn = std::function<Result<std::vector<uint32_t>>(
    uint32_t layer, uint32_t kv_head, uint32_t first, std::span<const std::byte> rows)>;

struct ReclusterOptions {
  uint32_t chunk_tokens = 4096;  // rows move only within their chunk; at most 65536
  RowOrderFn order;
  Progress progress;  // in rows
};

// Returns which tokens of a segment keep their rows for one (layer, KV head): positions in the
// prefix, ascending.
using KeptTokensFn = std::function<Result<std::vector<uint32_t>>(uint32_t layer, uint32_t kv_head)>;

struct CompressOptions {
  uint32_t kept_rows = 0;  // of each (layer, KV head): below the segment's own tokens
  KeptTokensFn kept;
  Progress progress;  // in rows
};

struct SegmentSizes {
  uint64_t now = 0, compressed = 0;  // bytes of the segment's file
};

// A NewBlob is written beside a segment that is not committed yet.
struct NewBlob {
  std::string name, producer;
  std::vector<std::byte> bytes;
};

// A SegmentWriter streams the rows of one new segment. Destroying it without Commit aborts the put
// and frees its space.
class SegmentWriter {
 public:
  virtual ~SegmentWriter() = default;
  // Returns the run of tokens that this segment stores (positions in the prefix); [begin, begin) if
  // nothing is new, or when Commit found that another put had stored them meanwhile.
  virtual TokenRange range() const = 0;
  // Returns whether WriteRows would take these tokens (kInvalidArgument: not this segment's, or
  // written before); so that a caller that writes a run in several calls writes all of it or
  // nothing.
  virtual Status CheckRun(uint32_t layer, HeadRange heads, uint32_t first, uint32_t n) const = 0;
  Status CheckRun(uint32_t layer, uint32_t first, uint32_t n) const {
    return CheckRun(layer, HeadRange{}, first, n);
  }
  // Writes rows of these KV heads for tokens [first, first + n) of one layer, already interleaved:
  // rows: [heads.n][n][row bytes], head-major, borrowed for the call. Layers and token runs may
  // come in any order, each token once per layer and head. Rows of heads that came together once
  // always do. A refused call (kInvalidArgument; also for NaN and Inf where rows are encoded) has
  // changed nothing.
  virtual Status WriteRows(uint32_t layer, HeadRange heads, uint32_t first, uint32_t n,
                           std::span<const std::byte> rows) = 0;
  Status WriteRows(uint32_t layer, uint32_t first, uint32_t n, std::span<const std::byte> rows) {
    return WriteRows(layer, HeadRange{}, first, n, rows);
  }
  // kFailedPrecondition names the first layer and token of these heads whose rows are missing.
  virtual Status CheckComplete(HeadRange heads) const = 0;
  // Waits until the disk has taken so much that WriteRows need not wait for it with n tokens; fails
  // when the caller's call ends first (base/call_scope.h). Nothing has changed then.
  virtual Status AwaitRoom(uint32_t n) = 0;
  // Verifies that everything is written (kFailedPrecondition names the first missing layer and
  // token; the writer can go on), syncs it, then makes one synced catalog commit. After it the
  // prefix is durable and visible.
  virtual Result<SegmentId> Commit() = 0;
  virtual void Abort() = 0;
};

class PrefixStore : public SegmentSource {
 public:
  // Locks the directory (a second opener gets kFailedPrecondition naming the owner's pid), opens or
  // creates the catalog, recovers: frees unfinished segments, reports missing ones. The lock lasts
  // until the store and all its writers and open prefixes are gone. A store of a newer format is
  // refused (kFailedPrecondition) and left unchanged.
  static Result<std::unique_ptr<PrefixStore>> Open(const StoreOptions& options);

  // Idempotent; kAlreadyExists when the name stands for another fingerprint or geometry.
  virtual Status PutModel(const ModelRecord& model) = 0;
  virtual Result<ModelRecord> GetModel(std::string_view name) const = 0;
  virtual std::vector<ModelRecord> ListModels() const = 0;
  // kNotFound; kFailedPrecondition while segments of it are stored (the message says how many) or
  // puts of it are under way.
  virtual Status RemoveModel(std::string_view name) = 0;

  virtual Result<Match> LongestMatch(std::string_view model, std::string_view tenant,
                                     std::span<const uint32_t> tokens,
                                     const Acceptance& accept = {}) const = 0;
  // Says where the stored rows of a prefix's tokens lie now, to a share of each segment's pages.
  // Reads no rows and counts as no use.
  virtual Result<RowsHeld> HeldRows(const SegmentId& id, TokenRange tokens) const = 0;
  // Says why LongestMatch finds no more tokens than it does.
  virtual Result<MatchExplanation> ExplainMatch(std::string_view model, std::string_view tenant,
                                                std::span<const uint32_t> tokens,
                                                const Acceptance& accept = {}) const = 0;
  // Returns when the model of this name was removed, if the store remembers it.
  virtual Result<std::optional<int64_t>> ModelRemovedAt(std::string_view name) const = 0;
  // `tokens` is the whole prompt; the writer's range() is the part that is not stored yet. n = 0 is
  // refused.
  virtual Result<std::unique_ptr<SegmentWriter>> BeginPut(std::string_view model,
                                                          std::string_view tenant,
                                                          std::span<const uint32_t> tokens,
                                                          std::string_view label,
                                                          const PutOptions& options = {}) = 0;
  virtual std::vector<PrefixInfo> ListPrefixes(const PrefixesAfter& after = {}) const = 0;
  // nullopt: the id is unknown. Reads nothing else of the prefix.
  virtual std::optional<std::string> TenantOf(const SegmentId& id) const = 0;
  // Removes the prefix's name and the data stored for it alone; tokens that others continue stay
  // until those are gone. kFailedPrecondition when it is open.
  virtual Status Remove(const SegmentId& id) = 0;

  // Makes one synced commit. An expired prefix matches no more from that moment on; readers that
  // have it open read on, and tokens that others continue stay. kNotFound when it was removed or
  // expired.
  virtual Status SetLifetime(const SegmentId& id, const LifetimeChange& change) = 0;
  // Notes a use that did not open the prefix, so that eviction spares it as if it had.
  virtual void NoteUse(const SegmentId& id) = 0;
  // Does a bounded piece of the work due every few seconds: removes expired prefixes, evicts a
  // little ahead of the puts, restores the ballast.
  virtual Status Maintain() = 0;

  // Rewrites the segment's rows in the reclustered layout (segment_layout.h): neighbours in key
  // space share pages, keys and values can be read apart. Readers are not disturbed. Does nothing
  // when the segment is reclustered already.
  virtual Status Recluster(const SegmentId& id, const ReclusterOptions& options) = 0;
  // Whether Compress would take the prefix now: nothing but its whole names needs its rows, and it
  // is not open. The message of kFailedPrecondition names the obstacle.
  virtual Status CheckCompressible(const SegmentId& id) const = 0;
  // What compressing with so many rows of each (layer, KV head) would save.
  virtual Result<SegmentSizes> SizesOf(const SegmentId& id, uint32_t kept_rows) const = 0;
  // Rewrites the segment in which the prefix ends with some of its rows alone, for good: what reads
  // others is refused from then on, and only matches that accept it find it. Its blobs stay as they
  // are. Errors: also those of CheckCompressible and of `kept`; nothing has changed then.
  virtual Status Compress(const SegmentId& id, const CompressOptions& options) = 0;
  // Brings the segment and its blobs under the newest key of the store (segment_reencrypt.h).
  // Returns whether anything was written for it. kFailedPrecondition: the store has no keys.
  virtual Result<bool> Reencrypt(const SegmentId& id, const Progress& progress) = 0;
  // Describes the segment that Compact would make now, under an id of no segment; the error says
  // why it would not.
  virtual Result<PrefixInfo> CheckCompaction(const SegmentId& leaf, uint32_t max_tokens) const = 0;
  // Joins a segment with the one it continues, if together they have at most max_tokens and nothing
  // else needs either: one file instead of two. The prefixes' names stay valid. The blobs of the
  // two are dropped, because ranges change; `blobs` are beside the returned segment before any
  // reader can see it. The message of kFailedPrecondition names the obstacle.
  virtual Result<SegmentId> Compact(const SegmentId& leaf, uint32_t max_tokens,
                                    std::span<const NewBlob> blobs = {}) = 0;
  // Copies the chain of a prefix to a remote tier; objects that are there already stay. Push may be
  // called again after a tier failed halfway: a segment counts once its last object is there.
  virtual Status Push(const SegmentId& id, RemoteTier& remote, const Progress& progress) = 0;
  // Fetches a prefix by the id it was pushed under, with its whole chain, verified page by page,
  // and commits it here as a put would: durable and visible when it returns.
  virtual Status Pull(const SegmentId& id, const RemoteTier& remote, const Progress& progress) = 0;

  // As Store::TakeSnapshot (prefixd/snapshot.h): one moment of the catalog and its segments. Blobs
  // that are replaced or removed meanwhile may be left out; they are made again.
  virtual Result<std::unique_ptr<Snapshot>> TakeSnapshot() = 0;

  // Reads and verifies everything that one prefix needs, root first (null: the whole store):
  // damaged segments are quarantined, a quarantined one that verifies again is released, and
  // damaged blobs are deleted. Segments that are removed meanwhile are left out; those that
  // take the place of compacted ones are verified instead.
  virtual Result<VerifyReport> Verify(const SegmentId* only, const Progress& progress) = 0;
  // Verifies all segments of one tenant likewise.
  virtual Result<VerifyReport> VerifyTenant(std::string_view tenant, const Progress& progress) = 0;
  // Verifies in the background, on one thread: slowly, least recently verified segments first,
  // behind everything else that reads. Returns when nothing is due, with the time (Unix ms) when a
  // segment will be; kCancelled when `wait` returned false: the next call goes on where it stopped,
  // also after a restart.
  virtual Result<int64_t> Scrub(const ScrubOptions& options) = 0;
  // Reads header and footer of every segment, one after the other and behind all other reads, and
  // quarantines what does not verify: for a thread of its own after Open, which looks for files
  // alone. Whoever uses a segment verifies it first in any case. kCancelled: `go_on` returned
  // false.
  virtual Status CheckEnds(const std::function<bool()>& go_on) = 0;
  // Reads rows of the prefixes used last into the host tier, the last one first, as long as it has
  // free room: for a thread of its own after Open.
  virtual Result<WarmedUp> WarmUp(const WarmUpOptions& options) = 0;
  // Set once, before anything is read.
  virtual void OnBlobLost(BlobLost told) = 0;

  struct Stats {
    std::string io_backend;  // "io_uring" or "threads"
    uint64_t segments = 0, bytes_on_disk = 0, bytes_free = 0;
    uint64_t host_tier_bytes = 0, host_tier_capacity = 0, host_hits = 0, host_misses = 0;
    uint64_t host_tier_pinned = 0, host_evictions = 0;
    // Bytes prefetched into the tier; the part that a step used; and the useless part: it left the
    // tier unused, was there already, or found no room. The rest is there and may be used yet.
    uint64_t prefetched_bytes = 0, prefetch_used_bytes = 0, prefetch_wasted_bytes = 0;
    std::string host_tier_huge_pages;  // "hugetlb", "transparent", or "none (why)"
    struct Tenant {
      std::string tenant;
      uint64_t bytes = 0;         // bytes of pages held
      uint64_t memory_bytes = 0;  // bytes of memory taken for them
      uint64_t share_bytes = 0;   // the tenant may always have this much
      uint64_t pinned_bytes = 0;  // read in place now; a page pinned twice counts twice
      uint64_t hits = 0, misses = 0, evictions = 0;  // in pages
    };
    std::vector<Tenant> host_tenants;  // tenants that have read since the start
    uint64_t bytes_written = 0, bytes_read = 0, puts = 0, puts_aborted = 0;
    // Rewriting counts in bytes_written too, so write amplification is bytes_written over
    // (bytes_written - bytes_rewritten).
    uint64_t bytes_rewritten = 0, reclustered = 0, compacted = 0;
    uint64_t recovered_orphans = 0, recovered_commits = 0, checksum_failures = 0;
    // The scrub's work since the store was opened; all segments were verified (or stored) since
    // verified_since_unix_ms.
    uint64_t scrub_bytes = 0, scrub_damaged = 0;
    uint64_t warmed_bytes = 0;           // read by WarmUp since the start
    uint64_t unchecked_segments = 0;     // that CheckEnds has not come to since the start
    int64_t verified_since_unix_ms = 0;  // 0: the store is empty
    uint64_t quota_bytes = 0, evictions = 0, evicted_bytes = 0, expired = 0;
    std::vector<TenantUsage> tenants;
  };
  virtual Stats stats() const = 0;
};

}  // namespace prefixd::storage
