// Holds the parts of an open store, shared by the store, its writers and its open prefixes: the
// last of them closes the directory. Each part has one subject; what it may do beside others, and
// which lock guards what, its header says. Internal to storage/ and its tests.
//
// Thread-safety: after Open the parts may be used by any number of threads. Locks are taken in this
// order: RoomMaker's eviction mutex, commit_mutex, then those inside the parts.
#pragma once

#include <functional>
#include <memory>
#include <mutex>

#include "storage/catalog/catalog.h"
#include "storage/catalog/prefix_tree.h"
#include "storage/catalog/store_dir.h"
#include "storage/host_tier/host_tier.h"
#include "storage/io/io_engine.h"
#include "storage/read/page_reader.h"
#include "storage/segment/segment_file_writer.h"
#include "storage/store/ballast.h"
#include "storage/store/blob_store.h"
#include "storage/store/open_puts.h"
#include "storage/store/prefix_names.h"
#include "storage/store/room_maker.h"
#include "storage/store/segment_access.h"
#include "storage/store/segment_cache.h"
#include "storage/store/segment_removal.h"
#include "storage/store/space.h"
#include "storage/store/store_counters.h"
#include "storage/store/store_options.h"
#include "storage/store/stored_models.h"
#include "storage/store/verifier.h"

namespace prefixd::storage {

// Let tests wrap the engine and the catalog that Open chose.
using EngineWrapper = std::function<std::unique_ptr<IoEngine>(std::unique_ptr<IoEngine>)>;
using CatalogWrapper = std::function<std::unique_ptr<Catalog>(std::unique_ptr<Catalog>)>;

class StoreCore : public std::enable_shared_from_this<StoreCore> {
 public:
  static Result<std::shared_ptr<StoreCore>> Open(const StoreOptions& options,
                                                 const EngineWrapper& wrap_engine = nullptr,
                                                 const CatalogWrapper& wrap_catalog = nullptr);
  // Does a bounded piece of the work due every few seconds.
  Status Maintain();

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
  StoreCounters counters;
  ReadServices services;  // each prefix adds its tenant's tier
  // Write buffers, as many as a put uses, whose memory the next put need not touch afresh.
  const std::shared_ptr<BufferPool> slabs =
      std::make_shared<BufferPool>(kSlabBytes, 8, options.SharedMemory().Charge(MemoryKind::kPuts));
  MemoryCharge catalog_memory;

  // Serialises commits. Held for writes of the catalog, never for reads of segments.
  std::mutex commit_mutex;
  int64_t last_verified_ms = 0;  // the scrub's latest; guarded by commit_mutex

  std::unique_ptr<StoredModels> models;
  std::unique_ptr<SegmentAccess> segments;
  std::unique_ptr<SegmentRemoval> removal;
  std::unique_ptr<PrefixNames> names;
  std::unique_ptr<RoomMaker> room;
  std::unique_ptr<Verifier> verifier;

 private:
  explicit StoreCore(const StoreOptions& o) : options(o) {}
  Status OpenParts(const EngineWrapper& wrap_engine, const CatalogWrapper& wrap_catalog);
  Status OpenEngine(const EngineWrapper& wrap);
  Status OpenCatalog(const CatalogWrapper& wrap);
  void JoinParts();

  // Last of the parts that it uses: open files of the cache go when memory is short.
  MemoryBudget::Giver giver_;
};

}  // namespace prefixd::storage
