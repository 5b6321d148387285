#include "storage/core/store_core.h"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <utility>

#include "storage/files/min_free.h"
#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/io/file.h"

namespace prefixd::storage {
namespace {

constexpr uint32_t kMaxGapPages = 16;

Status ValidateOptions(const StoreOptions& o) {
  if (o.dir.empty()) return InvalidArgument("the store needs a directory");
  if (o.block_tokens == 0 || o.block_tokens > 4096) {
    return InvalidArgument("block_tokens must lie in 1..4096");
  }
  if (o.max_inflight_ops == 0 || o.max_inflight_ops > 4096) {
    return InvalidArgument("max_inflight_ops must lie in 1..4096");
  }
  if (o.max_inflight_bytes < (1u << 20)) {
    return InvalidArgument("max_inflight_bytes must be at least 1 MiB");
  }
  if (o.max_gap_pages > kMaxGapPages) {
    return InvalidArgument("max_gap_pages must lie in 0.." + std::to_string(kMaxGapPages));
  }
  const uint64_t memory =
      static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(::getpagesize());
  if (o.host_tier_bytes > memory) {
    return InvalidArgument("a host tier of " + std::to_string(o.host_tier_bytes >> 20) +
                           " MiB does not fit this machine's memory of " +
                           std::to_string(memory >> 20) + " MiB; make it smaller (0: none)");
  }
  return {};
}

}  // namespace

Result<std::shared_ptr<StoreCore>> StoreCore::Join(const StoreOptions& options,
                                                   const EngineWrapper& wrap_engine,
                                                   const CatalogWrapper& wrap_catalog) {
  PREFIXD_TRY(ValidateOptions(options));
  PREFIXD_TRY(CreateStoreDir(options.dir));
  StoreOptions resolved = options;
  if (resolved.min_free_bytes == kByDisk) {
    PREFIXD_ASSIGN(const uint64_t disk, DiskBytes(options.dir));
    resolved.min_free_bytes = MinFreeOf(disk);
  }
  std::shared_ptr<StoreCore> core(new StoreCore(resolved));
  PREFIXD_TRY(core->OpenParts(wrap_engine, wrap_catalog));
  return core;
}

Status StoreCore::ReadKeys() {
  if (options.encryption_key_file.empty()) return {};
  PREFIXD_ASSIGN(auto ring, KeyRing::Read(options.encryption_key_file));
  if (!CipherAvailable(options.cipher)) {
    return InvalidArgument("this CPU has no instructions for " +
                           std::string(CipherName(options.cipher)));
  }
  if (options.cipher != CipherKind::kNone) ring->set_cipher(options.cipher);
  keys = std::move(ring);
  return {};
}

Status StoreCore::OpenParts(const EngineWrapper& wrap_engine, const CatalogWrapper& wrap_catalog) {
  PREFIXD_TRY(ReadKeys());
  PREFIXD_ASSIGN(lock, DirLock::Acquire(options.dir));
  CrashPoint("open.locked");
  PREFIXD_TRY(RefuseLostCatalog(options.dir));
  PREFIXD_ASSIGN(identity, ReadOrCreateIdentity(options.dir));
  auto opened = OpenStoreKeys(options.dir, keys.get(), &identity);
  if (!opened.ok()) return WithHowToRecover(opened.error(), options.dir);
  secret = *std::move(opened);
  if (keys && !secret) {
    // A store that was made with a key has been tampered with.
    LogWarning("the catalog in " + options.dir.string() +
               " lies in clear, with labels and first ids of prompts: the store was made without a "
               "key; `prefixctl recover --dir " +
               options.dir.string() + " --key-file FILE` makes a sealed one");
  }
  // The ballast is handled before anything is written: a store on a full disk must open, to be made
  // smaller.
  ballast = std::make_unique<Ballast>(options.dir / "ballast", options.ballast_bytes);
  PREFIXD_TRY(ballast->MakeRoom());
  PREFIXD_TRY(OpenEngine(wrap_engine));
  PREFIXD_TRY(OpenCatalog(wrap_catalog));
  PREFIXD_ASSIGN(tier, HostTier::Create({.capacity_bytes = options.host_tier_bytes,
                                         .shares = options.host_tier_shares,
                                         .hugetlb = options.host_tier_hugetlb,
                                         .lock_memory = options.host_tier_mlock,
                                         .on_block = options.on_host_block,
                                         .memory = options.memory}));
  JoinParts();
  return {};
}

Status StoreCore::OpenCatalog(const CatalogWrapper& wrap) {
  CrashPoint("open.before_catalog");
  auto opened = Catalog::Open(
      options.dir / "catalog", {kStoreFormatVersion, options.block_tokens, identity.store},
      [this] { return ballast->MakeRoom(); }, secret);
  catalog_memory = options.SharedMemory().Charge(MemoryKind::kCatalog, kCatalogMemoryBytes);
  if (!opened.ok()) return WithHowToRecover(opened.error(), options.dir);
  catalog = wrap ? wrap(std::move(*opened)) : std::move(*opened);
  CrashPoint("open.catalog");
  if (catalog->meta().store != identity.store) {
    return Error{Code::kCorrupt, "the catalog in " + options.dir.string() +
                                     " belongs to another store than its STORE file"};
  }
  if (catalog->meta().block_tokens != options.block_tokens) {
    LogWarning("the store keeps its block_tokens = " +
               std::to_string(catalog->meta().block_tokens));
  }
  return {};
}

void StoreCore::JoinParts() {
  blobs = std::make_unique<BlobStore>(options.dir, *engine,
                                      std::chrono::milliseconds(options.read_deadline_ms), keys);
  space = std::make_unique<SpaceAccount>(options, tree, *blobs, *ballast);
  services = {
      engine.get(),
      nullptr,  // readers have their tenant's
      &counters.bytes_read,
      &counters.checksum_failures,
      [this](const SegmentId& id, const std::string& how) { segments->Quarantine(id, how); },
      std::chrono::milliseconds(options.read_deadline_ms),
      options.max_gap_pages};
  const MemoryAccount shared = options.SharedMemory();
  services.buffers =
      std::make_shared<BufferPool>(kReadBufferBytes, 16, shared.Charge(MemoryKind::kReads));
  services.memory = shared;
  if (options.memory) {
    giver_ = options.memory->OnShortage(
        [this](uint64_t, const std::string* tenant) { return files.CloseOne(tenant); });
  }
  models = std::make_unique<StoredModels>(*catalog, tree);
  segments = std::make_unique<SegmentAccess>(
      SegmentAccess::Parts{options, direct, services, *catalog, tree, open_files, files, *blobs,
                           *models, counters, keys.get()});
  removal = std::make_unique<SegmentRemoval>(
      SegmentRemoval::Parts{options, commit_mutex, *catalog, tree, files, *tier, *blobs});
  names = std::make_unique<PrefixNames>(
      PrefixNames::Parts{commit_mutex, *catalog, tree, *segments, *removal, counters.expired});
  room = std::make_unique<RoomMaker>(
      RoomMaker::Parts{options, commit_mutex, tree, *blobs, *space, *removal, snapshot_taken});
  verifier = std::make_unique<Verifier>(Verifier::Parts{options, direct, services, tree, files,
                                                        *blobs, *models, *segments, keys.get()});
}

// A written page is read back: this shows whether the file system takes O_DIRECT at our alignment
// and whether io_uring really reads.
Status StoreCore::OpenEngine(const EngineWrapper& wrap) {
  const std::filesystem::path path = options.dir / "segments" / "probe.tmp";
  AlignedBuffer page(kPageBytes);
  std::memset(page.data(), 0x5a, page.size());
  PREFIXD_ASSIGN(UniqueFd fd, OpenFile(path, O_RDWR | O_CREAT | O_TRUNC));
  ssize_t written = ::pwrite(fd.get(), page.data(), page.size(), 0);
  if (written != static_cast<ssize_t>(page.size())) {
    return ErrnoError(written < 0 ? errno : ENOSPC, "cannot write " + path.string());
  }
  auto direct_fd = OpenFile(path, O_RDWR | O_DIRECT);
  direct =
      direct_fd.ok() &&
      ::pwrite(direct_fd->get(), page.data(), page.size(), 0) ==
          static_cast<ssize_t>(page.size()) &&
      ::pread(direct_fd->get(), page.data(), page.size(), 0) == static_cast<ssize_t>(page.size());
  if (!direct) LogInfo("the file system does not take O_DIRECT; reads go through the page cache");
  const IoLimits limits{options.max_inflight_bytes, options.max_inflight_ops};
  PREFIXD_ASSIGN(engine, NewEngine(options.io, limits, direct ? direct_fd->get() : fd.get()));
  if (wrap) engine = wrap(std::move(engine));
  CrashPoint("open.before_probe_removed");
  return RemoveFile(path);
}

Status StoreCore::Maintain() {
  names->SweepExpired();
  removal->FreeUnneeded({GoneReason::kExpired, ""});
  PREFIXD_TRY(room->MakeHeadroom());
  ballast->Restore(options.min_free_bytes);
  return {};
}

}  // namespace prefixd::storage
