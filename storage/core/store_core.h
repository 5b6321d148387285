// Holds the parts of an open store, shared by the store, its writers and its open prefixes: the
// last of them closes the directory. Each part has one subject; what it may do beside others, and
// which lock guards what, its header says. Internal to storage/ and its tests.
//
// Thread-safety: after Join the parts may be used by any number of threads. Locks are taken in this
// order: RoomMaker's eviction mutex, commit_mutex, then those inside the parts.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>

#include "base/descriptor_limit.h"
#include "storage/catalog/catalog.h"
#include "storage/catalog/prefix_tree.h"
#include "storage/catalog/store_dir.h"
#include "storage/catalog/store_keys.h"
#include "storage/core/open_puts.h"
#include "storage/core/prefix_names.h"
#include "storage/core/room_maker.h"
#include "storage/core/segment_access.h"
#include "storage/core/segment_removal.h"
#include "storage/core/store_counters.h"
#include "storage/core/stored_models.h"
#include "storage/core/unreadable.h"
#include "storage/core/verifier.h"
#include "storage/files/ballast.h"
#include "storage/files/blob_store.h"
#include "storage/files/open_files.h"
#include "storage/files/segment_cache.h"
#include "storage/files/space.h"
#include "storage/files/store_options.h"
#include "storage/host_tier/host_tier.h"
#include "storage/io/io_engine.h"
#include "storage/read/page_reader.h"
#include "storage/segment/segment_file_writer.h"

namespace prefixd::storage {

// Let tests wrap the engine and the catalog that Join opened.
using EngineWrapper = std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)>;
using CatalogWrapper = std::function<std::unique_ptr<Catalog>(std::unique_ptr<Catalog>)>;

class StoreCore : public std::enable_shared_from_this<StoreCore> {
 public:
  // Locks the directory and opens the parts. What they hold is not recovered yet: OpenStoreCore
  // (open_store.h) does both.
  static Result<std::shared_ptr<StoreCore>> Join(const StoreOptions& options,
                                                 const EngineWrapper& wrap_engine,
                                                 const CatalogWrapper& wrap_catalog);
  // Does a bounded piece of the work due every few seconds.
  Status Maintain();
  // Returns the hashes by which a prompt of this store is found.
  std::vector<BlockHash> HashesOf(const Fingerprint& model, std::string_view tenant,
                                  std::span<const uint32_t> tokens) const {
    return BlockHashes(model, tenant, tokens, catalog->meta().block_tokens,
                       secret ? secret->hash_key() : std::span<const uint8_t>());
  }

  const StoreOptions options;
  // Members are destroyed in reverse order, so the lock goes last.
  DirLock lock;
  StoreIdentity identity;
  // The master keys, and the secret of the store; null where it has none (store_keys.h).
  std::shared_ptr<const KeyRing> keys;
  std::shared_ptr<const StoreSecret> secret;
  bool direct = false;  // whether the file system takes O_DIRECT
  std::unique_ptr<IoEngine> engine;
  std::unique_ptr<Ballast> ballast;
  std::unique_ptr<Catalog> catalog;
  PrefixTree tree{[this](std::string_view tenant) { return options.MemoryOf(tenant); }};
  std::unique_ptr<BlobStore> blobs;
  std::unique_ptr<SpaceAccount> space;
  std::unique_ptr<HostTier> tier;
  OpenFiles open_files{options.max_open_files > 0 ? options.max_open_files
                                                  : DescriptorsForSegments(DescriptorLimit())};
  SegmentCache files{std::min<size_t>(128, open_files.most() / 2), options.tables_bytes};
  OpenPuts open_puts;
  Unreadable unreadable;
  StoreCounters counters;
  ReadServices services;  // each prefix adds its tenant's tier
  // Write buffers, as many as a put uses, whose memory the next put need not touch afresh.
  const std::shared_ptr<BufferPool> slabs =
      std::make_shared<BufferPool>(kSlabBytes, 8, options.SharedMemory().Charge(MemoryKind::kPuts));
  MemoryCharge catalog_memory;

  // Serialises commits. Held for writes of the catalog, never for reads of segments.
  std::mutex commit_mutex;
  std::atomic<bool> snapshot_taken{false};
  // The scrub's latest, and what the clock said when it looked last; guarded by commit_mutex.
  int64_t last_verified_ms = 0, scrub_clock_ms = 0;

  std::unique_ptr<StoredModels> models;
  std::unique_ptr<SegmentAccess> segments;
  std::unique_ptr<SegmentRemoval> removal;
  std::unique_ptr<PrefixNames> names;
  std::unique_ptr<RoomMaker> room;
  std::unique_ptr<Verifier> verifier;

 private:
  explicit StoreCore(const StoreOptions& o) : options(o) {}
  Status OpenParts(const EngineWrapper& wrap_engine, const CatalogWrapper& wrap_catalog);
  Status ReadKeys();
  Status OpenEngine(const EngineWrapper& wrap);
  Status OpenCatalog(const CatalogWrapper& wrap);
  void JoinParts();

  // Last of the parts that it uses: open files of the cache go when memory is short.
  MemoryBudget::Giver giver_;
};

}  // namespace prefixd::storage
