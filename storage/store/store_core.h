// Holds the store's parts in one place, shared by the store, its writers and its open prefixes: the
// last of them closes the directory. Internal to storage/ and its tests.
//
// Thread-safety: all methods may be called concurrently after Open.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "storage/catalog/catalog.h"
#include "storage/catalog/eviction.h"
#include "storage/catalog/prefix_tree.h"
#include "storage/catalog/store_dir.h"
#include "storage/host_tier/host_tier.h"
#include "storage/io/io_engine.h"
#include "storage/read/page_reader.h"
#include "storage/segment/segment_file_writer.h"
#include "storage/store/ballast.h"
#include "storage/store/blob_store.h"
#include "storage/store/open_puts.h"
#include "storage/store/prefix_store.h"
#include "storage/store/segment_cache.h"
#include "storage/store/space.h"

namespace prefixd::storage {

// Says whether a write may evict other prefixes.
enum class Room : uint8_t { kMayEvict, kAsItIs };

// Lets tests wrap the engine that Open chose.
using EngineWrapper = std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)>;

class StoreCore : public std::enable_shared_from_this<StoreCore> {
 public:
  static Result<std::shared_ptr<StoreCore>> Open(const StoreOptions& options,
                                                 const EngineWrapper& wrap);

  // A Scope holds what a request refers to, resolved once.
  struct Scope {
    ModelRecord model;
    std::string tenant;
    BlockHash id{};
  };
  Result<Scope> ResolveScope(std::string_view model, std::string_view tenant) const;
  Status PutModel(const ModelRecord& model);
  std::vector<ModelRecord> ListModels() const;
  Status RemoveModel(std::string_view name);
  // While it lives, the model is not removed: whoever commits a segment of it holds one.
  using ModelHold = std::shared_ptr<const void>;
  Result<ModelHold> HoldModel(std::string_view name);

  // Returns the longest stored prefix down to the token (store_match.cc).
  Result<Match> FindLongest(const Scope& scope, std::span<const BlockHash> hashes,
                            std::span<const uint32_t> tokens, const Acceptance& accept);
  // Opens (or finds open) a pinned segment, in the file that holds it now; quarantines one that
  // does not verify. kIds: only the token ids of the file may be used.
  enum class Need : uint8_t { kIds, kRows };
  Result<std::shared_ptr<const SegmentFile>> OpenSegment(const SegmentId& id,
                                                         Need need = Need::kRows);
  void Quarantine(const SegmentId& id, const std::string& reason);
  void LiftQuarantine(const SegmentId& id);
  void Touch(const SegmentId& id);
  Result<PrefixInfo> Info(const SegmentId& id) const;

  // Removes a prefix's name, and every segment that no name needs any more.
  Status Remove(const SegmentId& id);

  // Reserves within the limits (store_limits.cc). kResourceExhausted below the free-space watermark
  // or above a quota, when evicting does not help either; then nothing was evicted.
  Result<SpaceReservation> Reserve(const std::string& tenant, uint64_t bytes, Room room);
  Status SetLifetime(const SegmentId& id, const LifetimeChange& change);
  // Renews the name of a prefix that was put again: it stays at least as long as given, and is
  // restored if it was gone.
  Status Keep(const SegmentId& id, bool pinned, int64_t expires_unix_ms);
  void SweepExpired();
  Status Maintain();
  std::vector<TenantUsage> Tenants() const;

  // Frees the files and the memory of a segment that is gone from catalog and tree.
  Status FreeSegment(const SegmentRecord& record);
  void FreeUnneeded();
  // Frees a file that the catalog does not name any more; readers keep it open.
  Status FreeFile(const SegmentRecord& old);
  // Verifies the segments that `wanted` returns, each once; asks it again when some were removed or
  // compacted meanwhile, for what took their place. memory: for the tables of what is verified.
  Result<VerifyReport> Verify(const std::function<std::vector<SegmentRecord>()>& wanted,
                              const Progress& progress, MemoryAccount memory);
  // Reads and verifies one segment and its blobs; adds the findings to `report`. kCancelled when
  // `page_done` returns false; that, a deadline and want of memory are no findings.
  struct VerifyRun {
    ScrubPosition from;  // verified pages, if the file is still this one, end here
    size_t window_pages = kWindowPages;
    IoPriority blobs = IoPriority::kStepRead;
    MemoryAccount memory;  // empty for the scrub, which reads one segment at a time
    std::function<bool(const SegmentRecord& record, uint64_t n)> page_done;
  };
  Status VerifySegment(SegmentRecord record, const VerifyRun& run, VerifyReport& report);
  // Deletes a blob unless it verifies after all, and calls blob_lost, so that it is made again.
  void DropDamagedBlob(const SegmentId& id, std::string_view name);

  const StoreOptions options;
  // Members are destroyed in reverse order, so the lock goes last.
  DirLock lock;
  StoreIdentity identity;
  bool direct = false;  // whether the file system takes O_DIRECT
  std::unique_ptr<IoEngine> engine;
  std::unique_ptr<Ballast> ballast;
  std::unique_ptr<Catalog> catalog;
  PrefixTree tree;
  std::unique_ptr<BlobStore> blobs;
  std::unique_ptr<SpaceAccount> space;
  std::unique_ptr<HostTier> tier;
  SegmentCache files{128, options.tables_bytes};
  OpenPuts open_puts;
  ReadServices services;  // each prefix adds its tenant's tier
  // Write buffers, as many as a put uses, whose memory the next put need not touch afresh.
  const std::shared_ptr<BufferPool> slabs =
      std::make_shared<BufferPool>(kSlabBytes, 8, options.SharedMemory().Charge(MemoryKind::kPuts));
  MemoryCharge catalog_memory;

  // Serialises commits. Held for writes of the catalog, never for reads of segments.
  std::mutex commit_mutex;
  int64_t last_verified_ms = 0;  // guarded by commit_mutex
  std::atomic<uint64_t> bytes_written{0}, bytes_read{0}, puts{0}, puts_aborted{0};
  std::atomic<uint64_t> bytes_rewritten{0}, reclustered{0}, compacted{0};
  std::atomic<uint64_t> recovered_orphans{0}, recovered_commits{0}, checksum_failures{0};
  std::atomic<uint64_t> scrub_bytes{0}, scrub_damaged{0}, expired{0};
  PrefixStore::BlobLost blob_lost;

 private:
  explicit StoreCore(const StoreOptions& o) : options(o) {}
  Status OpenParts(const EngineWrapper& wrap);
  Status OpenEngine(const EngineWrapper& wrap);
  // The following are defined in store_recovery.cc.
  Status Recover();
  Status LoadSegments();
  Status AdoptLostCommits();  // defined in store_adopt.cc
  Status SweepSegmentFiles();
  void CheckSegments();
  Status CheckRelations(const SegmentRecord& record) const;
  Status CheckModel(const SegmentRecord& record, const SegmentHeader& header) const;

  // Both require commit_mutex. RemoveSegment also removes every name that stands for the segment.
  Status RemoveName(const SegmentId& id);
  Status EraseSegment(const SegmentId& id);

  // The following are defined in store_limits.cc.
  struct Name {
    bool gone = false;  // removed or expired
    bool pinned = false;
    int64_t expires_unix_ms = 0;
  };
  // Commits, synced, what `edit` makes of a prefix's name; afterwards the name is listed.
  Status ChangeName(const SegmentId& id, const std::function<Status(Name&)>& edit);
  EvictionPlan NewEvictionPlan() const;
  // Returns false and evicts nothing when everything that may go frees too little.
  bool EvictFor(const std::string& tenant, const SpaceShortage& shortage, const char* why);
  void Evict(std::span<const EvictionNode> victims, const char* why);
  bool Retained(const SegmentId& id) const;
  Status MakeHeadroom();

  // Last of the parts that it uses: open files of the cache go when memory is short.
  MemoryBudget::Giver giver_;
  std::set<Uuid> left_alone_;  // files that Recover neither knows nor may free
  std::mutex eviction_mutex_;  // locked before commit_mutex
  std::atomic<bool> wanted_room_{false};
  struct EvictionCount {
    uint64_t segments = 0, bytes = 0;
  };
  mutable std::mutex mutex_;  // guards models_, held_models_ and evicted_
  std::map<std::string, ModelRecord, std::less<>> models_;
  std::map<std::string, std::weak_ptr<const void>, std::less<>> held_models_;
  std::map<std::string, EvictionCount> evicted_;
};

int64_t NowUnixMs();

// Does what PrefixStore::Open does, with a wrapped engine.
Result<std::unique_ptr<PrefixStore>> OpenStoreWithEngine(const StoreOptions& options,
                                                         const EngineWrapper& wrap);
// Defined in store_put.cc.
Result<std::unique_ptr<SegmentWriter>> BeginPut(std::shared_ptr<StoreCore> core,
                                                std::string_view model, std::string_view tenant,
                                                std::span<const uint32_t> tokens,
                                                std::string_view label, const PutOptions& options);
// Defined in stored_prefix.cc.
Result<std::shared_ptr<const StoredPrefix>> OpenStoredPrefix(std::shared_ptr<StoreCore> core,
                                                             const SegmentId& id,
                                                             uint32_t n_tokens);

}  // namespace prefixd::storage
