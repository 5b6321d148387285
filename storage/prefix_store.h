// The store: what is kept and where. Knows bytes and rows; knows no attention.
//
// A stored prefix is a chain of immutable segments (runs of consecutive tokens). A put stores only
// what is not stored yet: its segment hangs below the longest stored prefix of the same model and
// tenant, which may end inside that parent segment. One synced catalog commit makes it visible; a
// put that dies before leaves nothing visible, and recovery at Open frees what it left on disk.
//
// Thread-safety: all methods of PrefixStore and StoredPrefix may be called concurrently; one
// SegmentWriter is used by one thread at a time. Errors: kCorrupt means that stored bytes did not
// verify and were not returned; kResourceExhausted a full disk or quota (nothing stored is lost).
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "attention/kv_shape.h"
#include "attention/ledger.h"
#include "attention/partition.h"
#include "attention/result.h"
#include "storage/identity.h"

namespace prefixd::storage {

enum class IoBackend : uint8_t { kAuto, kUring, kThreads };

struct StoreOptions {
  std::filesystem::path dir;              // created if missing (its parent must exist)
  IoBackend io = IoBackend::kAuto;        // io_uring when a probing read works, else threads
  uint64_t host_tier_bytes = 1ull << 30;  // bound of the verified-page cache (host_tier.h)
  // Fractions of it for tenants by name; the others have equal parts of the rest.
  std::vector<std::pair<std::string, double>> host_tier_shares;
  bool host_tier_hugetlb = false;  // from the system's pool of huge pages, where it has one
  bool host_tier_mlock = false;    // never swapped out
  // Told of every block of the tier's memory before its first use and after its last; quick.
  std::function<void(std::span<std::byte> block, bool taken)> on_host_block;
  uint64_t min_free_bytes = 256ull << 20;  // free-space watermark: puts below it are refused
  uint64_t quota_bytes = 0;                // physical bytes of all segments; 0: none
  uint64_t max_inflight_bytes = 16ull << 20;
  uint32_t max_inflight_ops = 64;
  uint32_t block_tokens = 16;  // granularity of prefix matching's hashes
};

// What is stored of a model: its name (unique in the store), fingerprint and geometry.
struct ModelRecord {
  std::string name;
  Fingerprint fingerprint;
  KvGeometry geometry;
  std::string description_json;  // the tagged fields behind the fingerprint, for people
};

struct SegmentId {
  std::array<uint8_t, 16> bytes{};
  std::string ToString() const;  // 32 hex digits
  static Result<SegmentId> Parse(std::string_view hex);
  auto operator<=>(const SegmentId&) const = default;
};

// A prefix is named by the segment it ends in; its tokens are those of the chain up to there.
struct PrefixInfo {
  SegmentId id;
  std::string model, tenant, label;
  uint32_t n_tokens = 0;         // of the whole chain
  uint32_t own_tokens = 0;       // stored in this segment
  std::vector<SegmentId> chain;  // root first, ending in `id`
  uint64_t own_bytes = 0;        // physical, on disk, blobs included
  uint32_t children = 0;
  int64_t created_unix_ms = 0, last_used_unix_ms = 0;
  bool quarantined = false;
};

struct Match {
  SegmentId id;                // segment in which the match ends; meaningless when n_tokens = 0
  uint32_t n_tokens = 0;       // matched down to the token, stored ids compared; 0: nothing stored
  uint32_t stored_tokens = 0;  // tokens of the prefix `id` (>= n_tokens)
};

// Physical reads of one call, by tier.
struct ReadStats {
  std::array<uint64_t, kTierCount> bytes{};
  uint64_t pages_ssd = 0, pages_host = 0;
  ReadStats& operator+=(const ReadStats& o);
};

struct VerifyReport {
  uint64_t segments = 0, pages = 0, blobs = 0, bytes = 0;
  std::vector<std::string> damaged;  // one sentence each: what and where
};

// (done, total, unit) for long work; called from the working thread, must be quick. Returning
// false asks to stop (kCancelled).
using Progress = std::function<bool(uint64_t done, uint64_t total, std::string_view unit)>;

// Streams the rows of one new segment. Destroyed without Commit: aborted, space freed.
class SegmentWriter {
 public:
  virtual ~SegmentWriter() = default;
  // The run of tokens this segment stores (the prefix's positions); [begin, begin) if nothing new.
  virtual TokenRange range() const = 0;
  // Rows of every KV head for tokens [first, first + n) of one layer, already interleaved:
  //   rows: [n_kv_heads][n][row bytes], head-major. Borrowed for the call.
  // Layers and token runs may come in any order, each token once per layer.
  virtual Status WriteRows(uint32_t layer, uint32_t first, uint32_t n,
                           std::span<const std::byte> rows) = 0;
  // Everything written, synced and verified complete (kFailedPrecondition names the first missing
  // layer and token; the writer can go on), then one synced catalog commit. After it the prefix is
  // durable and visible.
  virtual Result<SegmentId> Commit() = 0;
  virtual void Abort() = 0;
};

// Rows read in place: verified, and as they are while this lives, even after the prefix is closed.
struct BorrowedRows {
  std::vector<RowRef> rows;  // in the order of the ids
  // The memory all of them lie in: one region per tenant, mappable read-only through `region_fd`
  // (-1: it cannot be passed on) by whoever receives that. Valid as long as `hold`.
  uint64_t region_id = 0;  // never the same for two regions of a store
  std::span<const std::byte> region;
  int region_fd = -1;
  std::shared_ptr<const void> hold;  // letting go of it lets go of the rows
};

// A stored prefix opened for reading, pinned: removal waits for (or refuses) open prefixes.
class StoredPrefix {
 public:
  virtual ~StoredPrefix() = default;
  virtual const PrefixInfo& info() const = 0;
  virtual const ModelRecord& model() const = 0;
  virtual uint32_t n_tokens() const = 0;                 // may be cut shorter than info().n_tokens
  virtual std::span<const uint32_t> tokens() const = 0;  // [n_tokens]

  // Gathers single rows: out [ids.size()][row bytes], in the order of `ids` (ascending, <
  // n_tokens). Every byte returned was verified against its page's checksum.
  virtual Status ReadRows(uint32_t layer, uint32_t kv_head, std::span<const uint32_t> ids,
                          std::span<std::byte> out, ReadStats* stats) const = 0;
  // Rows where they lie in the host tier, read into it first where they are not there; nothing is
  // copied. All of them or an error: kFailedPrecondition for rows larger than a page and without a
  // host tier (use ReadRows), kResourceExhausted beyond what a tenant may hold in place (half its
  // share of the tier, counted in pages).
  virtual Result<BorrowedRows> BorrowRows(uint32_t layer, uint32_t kv_head,
                                          std::span<const uint32_t> ids,
                                          ReadStats* stats) const = 0;
  // A run of rows: out [range.size()][row bytes]. Streams; does not displace hot rows of the host
  // tier.
  virtual Status ReadRange(uint32_t layer, uint32_t kv_head, TokenRange range,
                           std::span<std::byte> out, ReadStats* stats) const = 0;
};

class PrefixStore {
 public:
  // Locks the directory (a second opener gets kFailedPrecondition naming the owner's pid), opens or
  // creates the catalog, recovers: frees unfinished segments, reports missing ones. The lock lasts
  // until the store and all its writers and open prefixes are gone. A store of a newer format is
  // refused (kFailedPrecondition) and left unchanged.
  static Result<std::unique_ptr<PrefixStore>> Open(const StoreOptions& options);
  virtual ~PrefixStore() = default;

  // Idempotent; kAlreadyExists when the name stands for another fingerprint or geometry.
  virtual Status PutModel(const ModelRecord& model) = 0;
  virtual Result<ModelRecord> GetModel(std::string_view name) const = 0;
  virtual std::vector<ModelRecord> ListModels() const = 0;

  virtual Result<Match> LongestMatch(std::string_view model, std::string_view tenant,
                                     std::span<const uint32_t> tokens) const = 0;
  // `tokens` is the whole prompt; the writer's range() is what is not stored yet. n = 0 is refused.
  virtual Result<std::unique_ptr<SegmentWriter>> BeginPut(std::string_view model,
                                                          std::string_view tenant,
                                                          std::span<const uint32_t> tokens,
                                                          std::string_view label) = 0;
  // n_tokens cuts the prefix (0: all of it).
  virtual Result<std::shared_ptr<const StoredPrefix>> OpenPrefix(const SegmentId& id,
                                                                 uint32_t n_tokens) = 0;

  // Small things beside a segment: summaries, indexes, query samples. Read whole, verified.
  // `producer` names what made it; a Get with another producer is kNotFound. Put replaces.
  virtual Status PutBlob(const SegmentId& id, std::string_view name, std::string_view producer,
                         std::span<const std::byte> bytes) = 0;
  virtual Result<std::vector<std::byte>> GetBlob(const SegmentId& id, std::string_view name,
                                                 std::string_view producer) const = 0;
  virtual std::vector<std::string> ListBlobs(const SegmentId& id) const = 0;

  virtual std::vector<PrefixInfo> ListPrefixes() const = 0;
  virtual Result<PrefixInfo> GetPrefix(const SegmentId& id) const = 0;
  // kFailedPrecondition when other prefixes continue it or it is open.
  virtual Status Remove(const SegmentId& id) = 0;
  // Reads and verifies everything of one segment (or all): damaged segments are quarantined, and
  // a quarantined one that verifies again is released.
  virtual Result<VerifyReport> Verify(const SegmentId* only, const Progress& progress) = 0;

  struct Stats {
    std::string io_backend;  // "io_uring" or "threads"
    uint64_t segments = 0, bytes_on_disk = 0, bytes_free = 0;
    uint64_t host_tier_bytes = 0, host_tier_capacity = 0, host_hits = 0, host_misses = 0;
    uint64_t host_tier_pinned = 0, host_evictions = 0;
    std::string host_tier_huge_pages;  // "hugetlb", "transparent", or "none (why)"
    struct Tenant {
      std::string tenant;
      uint64_t bytes = 0;         // of pages held
      uint64_t memory_bytes = 0;  // of memory taken for them
      uint64_t share_bytes = 0;   // it may always have so much
      uint64_t pinned_bytes = 0;  // read in place now; a page borrowed twice counts twice
      uint64_t hits = 0, misses = 0, evictions = 0;  // in pages
    };
    std::vector<Tenant> host_tenants;  // of those that have read since the start
    uint64_t bytes_written = 0, bytes_read = 0, puts = 0, puts_aborted = 0;
    uint64_t recovered_orphans = 0, checksum_failures = 0;
  };
  virtual Stats stats() const = 0;
};

}  // namespace prefixd::storage
