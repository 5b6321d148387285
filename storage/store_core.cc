#include "storage/store_core.h"

#include <fcntl.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <utility>

#include "storage/crash_point.h"
#include "storage/errors.h"
#include "storage/file.h"

namespace prefixd::storage {
namespace {

constexpr int64_t kTouchStepMs = 60'000;
constexpr size_t kMaxNameBytes = 256;
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
  return {};
}

}  // namespace

int64_t NowUnixMs() {
  using std::chrono::duration_cast, std::chrono::milliseconds, std::chrono::system_clock;
  return duration_cast<milliseconds>(system_clock::now().time_since_epoch()).count();
}

SpaceReservation& SpaceReservation::operator=(SpaceReservation&& other) noexcept {
  if (this != &other) {
    Release();
    core_ = std::exchange(other.core_, nullptr);
    bytes_ = std::exchange(other.bytes_, 0);
  }
  return *this;
}

void SpaceReservation::Release() {
  if (core_ == nullptr) return;
  std::lock_guard lock(core_->mutex_);
  core_->reserved_bytes_ -= bytes_;
  core_ = nullptr;
}

Result<std::shared_ptr<StoreCore>> StoreCore::Open(const StoreOptions& options,
                                                   const EngineWrapper& wrap) {
  PREFIXD_TRY(ValidateOptions(options));
  std::shared_ptr<StoreCore> core(new StoreCore(options));
  PREFIXD_TRY(core->OpenParts(wrap));
  PREFIXD_TRY(core->Recover());
  return core;
}

Status StoreCore::OpenParts(const EngineWrapper& wrap) {
  PREFIXD_TRY(CreateStoreDir(options.dir));
  PREFIXD_ASSIGN(lock, DirLock::Acquire(options.dir));
  CrashPoint("open.locked");
  PREFIXD_ASSIGN(identity, ReadOrCreateIdentity(options.dir));
  PREFIXD_TRY(OpenEngine(wrap));
  PREFIXD_TRY(RefuseLostCatalog(options.dir));
  CrashPoint("open.before_catalog");
  PREFIXD_TRY(OpenCatalog());
  if (catalog->meta().store != identity.store) {
    return Error{Code::kCorrupt, "the catalog in " + options.dir.string() +
                                     " belongs to another store than its STORE file"};
  }
  if (catalog->meta().block_tokens != options.block_tokens) {
    LogWarning("the store keeps its block_tokens = " +
               std::to_string(catalog->meta().block_tokens));
  }
  tier = std::make_unique<HostTier>(options.host_tier_bytes);
  blobs = std::make_unique<BlobStore>(options.dir, *engine);
  services = {engine.get(), tier.get(), &bytes_read, &checksum_failures,
              [this](const SegmentId& id, const std::string& how) { Quarantine(id, how); }};
  return {};
}

// A damaged commit log is cut, and a note says that commits may have been cut off with the damage:
// recovery then makes them again from their segments, however often it is interrupted.
Status StoreCore::OpenCatalog() {
  const CatalogMeta fresh{kStoreFormatVersion, options.block_tokens, identity.store};
  const std::filesystem::path path = options.dir / "catalog";
  auto opened = Catalog::Open(path, fresh, LogDamage::kRefuse);
  if (!opened.ok() && opened.error().code == Code::kCorrupt) {
    LogWarning(opened.error().message + "; its log is cut at the damage");
    PREFIXD_TRY(WriteFileAtomically(options.dir / kLogWasCut, ""));
    CrashPoint("open.before_cut");
    opened = Catalog::Open(path, fresh, LogDamage::kCut);
  }
  if (!opened.ok()) return opened.error();
  catalog = std::move(*opened);
  CrashPoint("open.catalog");
  return {};
}

// A page is written and read back: it shows whether the file system takes O_DIRECT at our
// alignment and whether io_uring really reads.
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
      PREFIXD_TRY(catalog->PutModel(model));  // what people and the runtime note of it may change
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

Result<std::shared_ptr<const SegmentFile>> StoreCore::OpenSegment(const SegmentRecord& record) {
  if (auto file = files.Find(record.id)) return file;
  auto opened = SegmentFile::Open(*engine, SegmentPath(options.dir, record.id), record, direct);
  if (!opened.ok()) {
    if (opened.error().code == Code::kCorrupt) {
      checksum_failures.fetch_add(1, std::memory_order_relaxed);
      Quarantine(record.id, opened.error().message);
    }
    return opened.error();
  }
  files.Add(*opened);
  return opened;
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
  if (!tree.Touch(id, now, kTouchStepMs)) return;
  if (Status saved = catalog->SetLastUsed(id, now); !saved.ok()) LogWarning(saved.error().message);
}

Result<PrefixInfo> StoreCore::Info(const SegmentId& id) const {
  PREFIXD_ASSIGN(PrefixInfo info, tree.Info(id));
  info.own_bytes += blobs->BytesOf(id);
  return info;
}

Result<SpaceReservation> StoreCore::Reserve(uint64_t bytes) {
  PREFIXD_ASSIGN(const uint64_t free, FreeBytes(options.dir));
  if (free < options.min_free_bytes || free - options.min_free_bytes < bytes) {
    return Error{Code::kResourceExhausted,
                 "the disk is too full: " + std::to_string(free) + " bytes are free, " +
                     std::to_string(options.min_free_bytes) + " must stay free and " +
                     std::to_string(bytes) + " are needed; remove prefixes or free space"};
  }
  const uint64_t stored = tree.file_bytes() + blobs->TotalBytes();
  std::lock_guard guard(mutex_);
  if (options.quota_bytes > 0 && stored + reserved_bytes_ + bytes > options.quota_bytes) {
    return Error{Code::kResourceExhausted,
                 "the store's quota of " + std::to_string(options.quota_bytes) +
                     " bytes is used up: " + std::to_string(stored + reserved_bytes_) +
                     " are taken and " + std::to_string(bytes) + " are needed; remove prefixes"};
  }
  reserved_bytes_ += bytes;
  return SpaceReservation(this, bytes);
}

Status StoreCore::Remove(const SegmentId& id) {
  // Under the commit lock, so that no put commits below a segment on its way out.
  std::lock_guard commit(commit_mutex);
  PREFIXD_ASSIGN(const PrefixInfo info, Info(id));
  PREFIXD_ASSIGN(const SegmentRecord record, tree.Erase(id));
  CrashPoint("remove.begin");
  if (Status removed = catalog->RemoveSegment(id); !removed.ok()) {
    ModelRecord model;
    {
      std::lock_guard guard(mutex_);
      model = models_.at(record.model);
    }
    tree.Insert({record, info.quarantined ? "removal failed halfway" : "", info.last_used_unix_ms},
                PrefixScope(model.fingerprint, record.tenant));
    return removed;
  }
  CrashPoint("remove.committed");
  files.Erase(id);
  tier->EraseSegment(record.sequence);
  // It is gone for good; what follows frees space, and recovery would do it too.
  PREFIXD_TRY(RemoveFile(SegmentPath(options.dir, id)));
  CrashPoint("remove.segment_removed");
  PREFIXD_TRY(blobs->RemoveAll(id));
  CrashPoint("remove.before_directory_sync");
  return SyncDirectory(options.dir / "segments");
}

}  // namespace prefixd::storage
