#include "storage/store/store_core.h"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <utility>

#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/io/file.h"

namespace prefixd::storage {
namespace {

constexpr int64_t kTouchStepMs = 60'000;
constexpr size_t kMaxNameBytes = 256;
constexpr uint32_t kMaxGapPages = 16;
constexpr size_t kMaxDescriptionBytes = 64 << 10;

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

int64_t NowUnixMs() {
  using std::chrono::duration_cast, std::chrono::milliseconds, std::chrono::system_clock;
  return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

Result<std::shared_ptr<StoreCore>> StoreCore::Open(const StoreOptions& options,
                                                   const EngineWrapper& wrap) {
  PREFIXD_TRY(ValidateOptions(options));
  std::shared_ptr<StoreCore> core(new StoreCore(options));
  PREFIXD_TRY(core->OpenParts(wrap));
  PREFIXD_TRY(core->Recover());
  core->SweepExpired();
  core->FreeUnneeded();
  core->ballast->Restore(options.min_free_bytes);
  return core;
}

Status StoreCore::OpenParts(const EngineWrapper& wrap) {
  PREFIXD_TRY(CreateStoreDir(options.dir));
  PREFIXD_ASSIGN(lock, DirLock::Acquire(options.dir));
  CrashPoint("open.locked");
  PREFIXD_TRY(RefuseLostCatalog(options.dir));
  PREFIXD_ASSIGN(identity, ReadOrCreateIdentity(options.dir));
  // The ballast is handled before anything is written: a store on a full disk must open, to be made
  // smaller.
  ballast = std::make_unique<Ballast>(options.dir / "ballast", options.ballast_bytes);
  PREFIXD_TRY(ballast->MakeRoom());
  PREFIXD_TRY(OpenEngine(wrap));
  CrashPoint("open.before_catalog");
  auto opened = Catalog::Open(options.dir / "catalog",
                              {kStoreFormatVersion, options.block_tokens, identity.store},
                              [this] { return ballast->MakeRoom(); });
  catalog_memory = options.SharedMemory().Charge(MemoryKind::kCatalog, kCatalogMemoryBytes);
  if (!opened.ok()) return WithHowToRecover(opened.error(), options.dir);
  catalog = std::move(*opened);
  CrashPoint("open.catalog");
  if (catalog->meta().store != identity.store) {
    return Error{Code::kCorrupt, "the catalog in " + options.dir.string() +
                                     " belongs to another store than its STORE file"};
  }
  if (catalog->meta().block_tokens != options.block_tokens) {
    LogWarning("the store keeps its block_tokens = " +
               std::to_string(catalog->meta().block_tokens));
  }
  PREFIXD_ASSIGN(tier, HostTier::Create({.capacity_bytes = options.host_tier_bytes,
                                         .shares = options.host_tier_shares,
                                         .hugetlb = options.host_tier_hugetlb,
                                         .lock_memory = options.host_tier_mlock,
                                         .on_block = options.on_host_block,
                                         .memory = options.memory}));
  blobs = std::make_unique<BlobStore>(options.dir, *engine,
                                      std::chrono::milliseconds(options.read_deadline_ms));
  space = std::make_unique<SpaceAccount>(options, tree, *blobs, *ballast);
  services = {engine.get(),
              nullptr,  // readers have their tenant's
              &bytes_read,
              &checksum_failures,
              [this](const SegmentId& id, const std::string& how) { Quarantine(id, how); },
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
  return {};
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

Result<StoreCore::Scope> StoreCore::ResolveScope(std::string_view model,
                                                 std::string_view tenant) const {
  if (tenant.size() > kMaxNameBytes) return InvalidArgument("a tenant has at most 256 bytes");
  std::lock_guard guard(mutex_);
  const auto it = models_.find(model);
  if (it == models_.end()) {
    return Error{Code::kNotFound, "no model named '" + std::string(model) + "' in the store"};
  }
  return Scope{it->second, std::string(tenant), PrefixScope(it->second.fingerprint, tenant)};
}

Status StoreCore::PutModel(const ModelRecord& model) {
  PREFIXD_TRY(model.geometry.Validate());
  if (model.name.empty() || model.name.size() > kMaxNameBytes ||
      model.description_json.size() > kMaxDescriptionBytes) {
    return InvalidArgument(
        "a model has a name of 1..256 bytes and a description of at most 64 KiB");
  }
  std::lock_guard guard(mutex_);
  for (const auto& [name, known] : models_) {
    const bool same = known.fingerprint == model.fingerprint && known.geometry == model.geometry;
    if (name == model.name && same) {
      if (known.description_json == model.description_json) return {};
      PREFIXD_TRY(catalog->PutModel(model));  // people and the runtime may have changed its notes
      models_.at(model.name) = model;
      return {};
    }
    if (name == model.name) {
      return Error{Code::kAlreadyExists,
                   "model '" + name + "' is stored with another fingerprint or geometry"};
    }
    if (known.fingerprint == model.fingerprint && !(known.geometry == model.geometry)) {
      return Error{Code::kAlreadyExists, "the fingerprint of model '" + model.name +
                                             "' is that of model '" + name +
                                             "', which has another geometry"};
    }
  }
  CrashPoint("model.begin");
  PREFIXD_TRY(catalog->PutModel(model));
  CrashPoint("model.done");
  models_.emplace(model.name, model);
  return {};
}

std::vector<ModelRecord> StoreCore::ListModels() const {
  std::lock_guard guard(mutex_);
  std::vector<ModelRecord> out;
  for (const auto& [name, model] : models_) out.push_back(model);
  return out;
}

Result<StoreCore::ModelHold> StoreCore::HoldModel(std::string_view name) {
  std::lock_guard guard(mutex_);
  if (!models_.contains(name)) {
    return Error{Code::kNotFound, "no model named '" + std::string(name) + "' in the store"};
  }
  std::weak_ptr<const void>& held = held_models_[std::string(name)];
  ModelHold hold = held.lock();
  if (!hold) held = hold = std::make_shared<char>();
  return hold;
}

// A put inserts its segment before it lets go of the model, so that what is seen here in this order
// is complete.
Status StoreCore::RemoveModel(std::string_view name) {
  std::lock_guard guard(mutex_);
  const auto it = models_.find(name);
  if (it == models_.end()) {
    return Error{Code::kNotFound, "no model named '" + std::string(name) + "' in the store"};
  }
  const auto held = held_models_.find(name);
  if (held != held_models_.end() && !held->second.expired()) {
    return Error{Code::kFailedPrecondition,
                 "puts of model '" + std::string(name) + "' are under way; end them first"};
  }
  if (const uint64_t segments = tree.SegmentsOf(name); segments > 0) {
    return Error{Code::kFailedPrecondition, "model '" + std::string(name) + "' is used by " +
                                                std::to_string(segments) +
                                                " stored segments; remove its prefixes first"};
  }
  CrashPoint("model.before_removal");
  PREFIXD_TRY(catalog->RemoveModel(name));
  CrashPoint("model.removed");
  if (held != held_models_.end()) held_models_.erase(held);
  models_.erase(it);
  return {};
}

Result<std::shared_ptr<const SegmentFile>> StoreCore::OpenSegment(const SegmentId& id, Need need) {
  while (true) {
    PREFIXD_ASSIGN(const SegmentRecord record, tree.Record(id));
    const auto opened = [&]() -> Result<std::shared_ptr<const SegmentFile>> {
      auto file = files.Find(record);
      if (!file) {
        const auto open = need == Need::kRows ? &SegmentFile::Open : &SegmentFile::OpenIds;
        PREFIXD_ASSIGN(file, open(*engine, SegmentPath(options.dir, record.file), record, direct,
                                  services.read_deadline, options.MemoryOf(record.tenant)));
        PREFIXD_TRY(CheckModel(record, file->header()));
        files.Add(file);
      }
      if (need == Need::kRows) PREFIXD_TRY(file->LoadTable(*engine));
      return file;
    }();
    if (opened.ok()) return opened;
    // A rewrite between the look at the tree and the opening removes the old file rightly.
    if (const auto now = tree.Record(id); !now.ok() || now->file != record.file) continue;
    if (opened.error().code == Code::kCorrupt) {
      checksum_failures.fetch_add(1, std::memory_order_relaxed);
      files.Erase(record);
      Quarantine(id, opened.error().message);
    }
    return opened.error();
  }
}

void StoreCore::Quarantine(const SegmentId& id, const std::string& reason) {
  if (!tree.SetQuarantine(id, reason)) return;
  LogWarning("segment " + id.ToString() + " is quarantined: " + reason);
  CrashPoint("quarantine.begin");
  if (Status saved = catalog->SetQuarantine(id, reason); !saved.ok()) {
    LogWarning("the quarantine lasts until the store is closed: " + saved.error().message);
  }
}

void StoreCore::LiftQuarantine(const SegmentId& id) {
  if (!tree.SetQuarantine(id, "")) return;
  LogInfo("segment " + id.ToString() + " verifies again; its quarantine is lifted");
  CrashPoint("quarantine.before_lift");
  if (Status saved = catalog->SetQuarantine(id, ""); !saved.ok()) {
    LogWarning(saved.error().message);
  }
}

void StoreCore::Touch(const SegmentId& id) {
  const int64_t now = NowUnixMs();
  for (const PrefixTree::Use& use : tree.Touch(id, now, kTouchStepMs)) {
    Status saved = catalog->SetLastUsed(use.id, now, use.heat);
    if (!saved.ok()) return LogWarning(saved.error().message);
  }
}

Result<PrefixInfo> StoreCore::Info(const SegmentId& id) const {
  PREFIXD_ASSIGN(PrefixInfo info, tree.Info(id));
  info.own_bytes += blobs->BytesOf(id);
  info.listed = info.listed && !Expired(info.expires_unix_ms, NowUnixMs());
  return info;
}

Status StoreCore::Remove(const SegmentId& id) {
  {
    // The commit lock keeps puts from committing below a segment that is being removed.
    std::lock_guard commit(commit_mutex);
    PREFIXD_TRY(RemoveName(id));
  }
  FreeUnneeded();
  return {};
}

Status StoreCore::RemoveName(const SegmentId& id) {
  CatalogChange change;
  if (tree.Resolve(id).second > 0) {
    change.remove_aliases.push_back(id);
    PREFIXD_ASSIGN(const AliasRecord alias,
                   tree.EraseAlias(id, [&] { return catalog->Apply(change); }));
    return {};
  }
  PREFIXD_ASSIGN(const PrefixInfo info, Info(id));
  PREFIXD_ASSIGN(SegmentRecord record, tree.Record(id));
  if (!record.listed) {
    return Error{Code::kNotFound, "prefix " + id.ToString() +
                                      " was removed; its tokens stay while others need them"};
  }
  if (info.children == 0 && tree.AliasesInto(id).empty()) return EraseSegment(id);
  record.listed = record.pinned = false;
  record.expires_unix_ms = 0;
  change.put.push_back({record, std::nullopt});
  return tree.Update(record, record.file, [&] { return catalog->Apply(change); });
}

Status StoreCore::EraseSegment(const SegmentId& id) {
  CatalogChange change;
  change.remove.push_back(id);
  for (const AliasRecord& alias : tree.AliasesInto(id)) change.remove_aliases.push_back(alias.id);
  CrashPoint("remove.before_commit");
  PREFIXD_ASSIGN(const SegmentRecord record,
                 tree.Erase(id, [&] { return catalog->Apply(change); }));
  CrashPoint("remove.committed");
  return FreeSegment(record);
}

Status StoreCore::FreeSegment(const SegmentRecord& record) {
  // The segment is gone for good; the rest only frees space, and recovery would do it too.
  PREFIXD_TRY(FreeFile(record));
  CrashPoint("remove.before_blobs");
  PREFIXD_TRY(blobs->RemoveAll(record.id));
  CrashPoint("remove.before_directory_sync");
  return SyncDirectory(options.dir / "segments");
}

Status StoreCore::FreeFile(const SegmentRecord& old) {
  files.Erase(old);
  tier->EraseSegment(old.tenant, old.sequence);
  return RemoveFile(SegmentPath(options.dir, old.file));
}

// Each round removes a segment, which may make the one that it continued unneeded too.
void StoreCore::FreeUnneeded() {
  while (true) {
    bool freed = false;
    for (const SegmentId& id : tree.Unneeded()) {
      std::lock_guard commit(commit_mutex);
      const auto record = tree.Record(id);
      if (!record.ok() || record->listed) continue;  // removed, or needed again
      const Status done = EraseSegment(id);
      if (tree.Record(id).ok()) continue;  // pinned, or the catalog refused
      freed = true;
      if (!done.ok()) LogWarning(done.error().message);
    }
    if (!freed) return;
  }
}

}  // namespace prefixd::storage
