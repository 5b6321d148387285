// The store's parts in one place, shared by the store, its writers and its open prefixes: whoever
// is last closes the directory. Internal to storage/ and its tests.
//
// Thread-safety: all methods may be called concurrently after Open.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "storage/blob_store.h"
#include "storage/catalog.h"
#include "storage/host_tier.h"
#include "storage/io_engine.h"
#include "storage/page_reader.h"
#include "storage/prefix_store.h"
#include "storage/prefix_tree.h"
#include "storage/segment_cache.h"
#include "storage/store_dir.h"

namespace prefixd::storage {

class StoreCore;

// Bytes promised to a put that is not in the catalog yet; given back when destroyed.
class SpaceReservation {
 public:
  SpaceReservation() = default;
  SpaceReservation(StoreCore* core, uint64_t bytes) : core_(core), bytes_(bytes) {}
  SpaceReservation(SpaceReservation&& other) noexcept { *this = std::move(other); }
  SpaceReservation& operator=(SpaceReservation&& other) noexcept;
  ~SpaceReservation() { Release(); }
  void Release();

 private:
  StoreCore* core_ = nullptr;
  uint64_t bytes_ = 0;
};

// Lets tests wrap the engine that Open chose.
using EngineWrapper = std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)>;

class StoreCore {
 public:
  static Result<std::shared_ptr<StoreCore>> Open(const StoreOptions& options,
                                                 const EngineWrapper& wrap);

  // What a request is about, resolved once.
  struct Scope {
    ModelRecord model;
    std::string tenant;
    BlockHash id{};
  };
  Result<Scope> ResolveScope(std::string_view model, std::string_view tenant) const;
  Status PutModel(const ModelRecord& model);
  std::vector<ModelRecord> ListModels() const;

  // Longest stored prefix down to the token (store_match.cc).
  Result<Match> FindLongest(const Scope& scope, std::span<const BlockHash> hashes,
                            std::span<const uint32_t> tokens);
  // Opens (or finds open) a pinned segment; one that does not verify is quarantined.
  Result<std::shared_ptr<const SegmentFile>> OpenSegment(const SegmentRecord& record);
  void Quarantine(const SegmentId& id, const std::string& reason);
  void LiftQuarantine(const SegmentId& id);
  void Touch(const SegmentId& id);
  Result<PrefixInfo> Info(const SegmentId& id) const;

  // kResourceExhausted below the free-space watermark or above the quota.
  Result<SpaceReservation> Reserve(uint64_t bytes);
  Status Remove(const SegmentId& id);
  Result<VerifyReport> Verify(const SegmentId* only, const Progress& progress);

  const StoreOptions options;
  // Members are destroyed in reverse: the lock goes last.
  DirLock lock;
  StoreIdentity identity;
  bool direct = false;  // whether the file system takes O_DIRECT
  std::unique_ptr<IoEngine> engine;
  std::unique_ptr<Catalog> catalog;
  PrefixTree tree;
  std::unique_ptr<BlobStore> blobs;
  std::unique_ptr<HostTier> tier;
  SegmentCache files{128};
  ReadServices services;

  std::mutex commit_mutex;  // one commit at a time, so that equal prompts find each other
  std::atomic<uint64_t> next_sequence{1};
  std::atomic<uint64_t> bytes_written{0}, bytes_read{0}, puts{0}, puts_aborted{0};
  std::atomic<uint64_t> recovered_orphans{0}, checksum_failures{0};

 private:
  friend class SpaceReservation;
  explicit StoreCore(const StoreOptions& o) : options(o) {}
  Status OpenParts(const EngineWrapper& wrap);
  Status OpenEngine(const EngineWrapper& wrap);
  Status OpenCatalog();
  // store_recovery.cc
  Status Recover();
  Status LoadSegments();
  Status SweepSegmentFiles();
  void CheckSegments();
  // store_adopt.cc
  Status AdoptSegments();
  Status AdoptSegment(const SegmentRecord& sealed, const ModelRecord& model);
  Status VerifySegment(const SegmentRecord& record, VerifyReport& report,
                       const std::function<bool(uint64_t)>& page_done);

  mutable std::mutex mutex_;  // guards models_ and reserved_bytes_
  std::map<std::string, ModelRecord, std::less<>> models_;
  uint64_t reserved_bytes_ = 0;
};

int64_t NowUnixMs();

// PrefixStore::Open with a wrapped engine.
Result<std::unique_ptr<PrefixStore>> OpenStoreWithEngine(const StoreOptions& options,
                                                         const EngineWrapper& wrap);
// store_put.cc
Result<std::unique_ptr<SegmentWriter>> BeginPut(std::shared_ptr<StoreCore> core,
                                                std::string_view model, std::string_view tenant,
                                                std::span<const uint32_t> tokens,
                                                std::string_view label);
// stored_prefix.cc
Result<std::shared_ptr<const StoredPrefix>> OpenStoredPrefix(std::shared_ptr<StoreCore> core,
                                                             const SegmentId& id,
                                                             uint32_t n_tokens);

}  // namespace prefixd::storage
