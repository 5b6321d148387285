#include "storage/recover.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "storage/catalog.h"
#include "storage/errors.h"
#include "storage/page_reader.h"
#include "storage/segment_inspect.h"
#include "storage/store_dir.h"

namespace prefixd::storage {
namespace fs = std::filesystem;
namespace {

constexpr size_t kSegmentsPerCommit = 256;
constexpr bool kDirect = true;  // verify what is on the disk, where the file system allows it

struct Found {
  fs::path path;
  SegmentRecord record;
  SegmentManifest manifest;
  std::string damage;  // of its rows; empty: none seen
};

bool Exists(const fs::path& path) {
  std::error_code ignored;
  return fs::exists(fs::symlink_status(path, ignored));
}

Status Rename(const fs::path& from, const fs::path& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) return {};
  return ErrnoError(errno, "cannot rename " + from.string() + " to " + to.string());
}

Status MakeDirectory(const fs::path& path) {
  if (::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) return {};
  return ErrnoError(errno, "cannot create the directory " + path.string());
}

Status RemoveTree(const fs::path& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error) return ErrnoError(error.value(), "cannot remove " + path.string());
  return {};
}

class Rebuilder {
 public:
  Rebuilder(const RecoverOptions& options, const Progress& progress)
      : options_(options), dir_(options.dir), progress_(progress), engine_(NewThreadEngine({})) {}

  Result<RecoverReport> Run() {
    if (!Exists(dir_ / "segments") && !Exists(dir_ / "STORE")) {
      return Error{Code::kNotFound, "there is no prefixd store in " + dir_.string()};
    }
    PREFIXD_ASSIGN(const DirLock lock, DirLock::Acquire(dir_));
    PREFIXD_TRY(CreateStoreDir(dir_));
    PREFIXD_TRY(ReadIdentity());
    PREFIXD_TRY(Scan());
    PREFIXD_TRY(CheckIdentity());
    DropOtherModels();
    DropTwins();
    DropReplaced();
    CollectAliases();
    PREFIXD_TRY(WriteCatalog());
    PREFIXD_TRY(SetDamagedAside());
    PREFIXD_TRY(WriteIdentity());
    PREFIXD_TRY(Swap());
    PREFIXD_TRY(Free());
    return std::move(report_);
  }

 private:
  Status Step(std::string_view what) const {
    if (!options_.before_step || options_.before_step(what)) return {};
    return Error{Code::kCancelled, "recovery was stopped before: " + std::string(what)};
  }

  Status ReadIdentity() {
    if (!Exists(dir_ / "STORE")) return {};
    auto identity = ReadIdentityFile(dir_);
    if (identity.ok()) store_ = identity->store;
    if (identity.ok() || identity.error().code == Code::kCorrupt) return {};
    return identity.error();
  }

  Status Scan() {
    PREFIXD_ASSIGN(const auto entries, ListDirectory(dir_ / "segments"));
    std::vector<std::pair<fs::path, Uuid>> files;
    std::error_code ignored;
    for (const fs::directory_entry& entry : entries) {
      const auto parsed = ParseSegmentsEntry(entry.path().filename().string());
      if (!parsed || !parsed->blob.empty()) continue;
      files.emplace_back(entry.path(), parsed->id);
      total_pages_ += entry.file_size(ignored) / kPageBytes;
    }
    for (const auto& [path, name] : files) {
      const uint64_t before = done_pages_;
      PREFIXD_TRY(Look(path, name));
      done_pages_ = before + fs::file_size(path, ignored) / kPageBytes;
      PREFIXD_TRY(Report());
    }
    return {};
  }

  Status Report() const {
    if (!progress_ || progress_(std::min(done_pages_, total_pages_), total_pages_, "pages")) {
      return {};
    }
    return Error{Code::kCancelled, "recovery was stopped; nothing has changed"};
  }

  Status Look(const fs::path& path, const Uuid& name) {
    auto inspected = InspectSegment(*engine_, path, kDirect);
    if (!inspected.ok()) {
      const Error& error = inspected.error();
      if (error.code == Code::kFailedPrecondition) return error;
      if (error.code == Code::kCorrupt && IsUnfinished(*engine_, path, kDirect)) {
        unfinished_.push_back(path);
      } else {
        damaged_.emplace_back(path, error.message);
      }
      return {};
    }
    Found found{path, inspected->file->record(), std::move(inspected->manifest), ""};
    if (found.record.file != name) {
      damaged_.emplace_back(path, "it carries the name of another file");
      return {};
    }
    stores_[inspected->file->header().store].push_back(path);
    if (options_.verify_data) PREFIXD_TRY(VerifyRows(*inspected->file, found));
    found_.push_back(std::move(found));
    return {};
  }

  Status VerifyRows(const SegmentFile& file, Found& found) {
    std::atomic<uint64_t> bytes_read{0}, failures{0};
    ReadServices services;
    services.engine = engine_.get();
    services.bytes_read = &bytes_read;
    services.checksum_failures = &failures;
    services.on_corrupt = [](const SegmentId&, const std::string&) {};
    bool stopped = false;
    Status sound = VerifyAllPages(services, file, [&](uint64_t n) {
      done_pages_ += n;
      stopped = !Report().ok();
      return !stopped;
    });
    if (stopped) return sound;
    if (!sound.ok()) found.damage = sound.error().message;
    return {};
  }

  // Every header names its store. Without STORE they must agree.
  Status CheckIdentity() {
    // A STORE that no segment agrees with was written after the loss.
    if (store_ && (stores_.empty() || stores_.contains(*store_))) {
      std::erase_if(found_, [&](const Found& f) {
        const auto& own = stores_[*store_];
        if (std::find(own.begin(), own.end(), f.path) != own.end()) return false;
        damaged_.emplace_back(f.path, "it belongs to another store");
        return true;
      });
      return {};
    }
    report_.identity_rebuilt = true;
    if (stores_.size() == 1) {
      store_ = stores_.begin()->first;
      return {};
    }
    if (stores_.empty()) {
      return Error{Code::kNotFound, "the STORE file of " + dir_.string() +
                                        " is lost and no segment verifies that could say whose "
                                        "store it was; start from an empty directory"};
    }
    std::string files;
    for (const auto& [store, paths] : stores_) files += " " + paths.front().filename().string();
    return Error{Code::kCorrupt, "the segments in " + dir_.string() +
                                     " belong to different stores (for example" + files +
                                     "); move those of the other store away, or restore STORE"};
  }

  // Takes out what `drop` says; `why` empty: another file has its rows.
  template <typename Drop>
  void TakeOut(const std::string& why, Drop drop) {
    std::erase_if(found_, [&](const Found& f) {
      if (!drop(f)) return false;
      if (!why.empty() || !f.damage.empty()) {
        damaged_.emplace_back(f.path, why.empty() ? f.damage : why);
      } else {
        superseded_.push_back(f.path);
      }
      return true;
    });
  }

  // A model's last manifest is the one to believe.
  void DropOtherModels() {
    std::map<std::string, uint64_t> last;
    for (const Found& f : found_) {
      uint64_t& sequence = last[f.record.model];
      if (f.record.sequence < sequence) continue;
      sequence = f.record.sequence;
      models_[f.record.model] = f.manifest.model;
      if (sequence >= last_sequence_) block_tokens_ = f.manifest.block_tokens;
      last_sequence_ = std::max(last_sequence_, sequence);
    }
    TakeOut("another model was stored under its model's name later", [&](const Found& f) {
      return models_.at(f.record.model).fingerprint != f.manifest.model.fingerprint;
    });
  }

  // Of two files of one segment (a rewrite was cut short) the later is kept, if its rows are sound.
  void DropTwins() {
    std::map<SegmentId, const Found*> best;
    for (const Found& f : found_) {
      const Found*& kept = best[f.record.id];
      const auto worth = [](const Found& x) {
        return std::pair(x.damage.empty(), x.record.sequence);
      };
      if (kept == nullptr || worth(f) > worth(*kept)) kept = &f;
    }
    std::set<Uuid> keep;
    for (const auto& [id, f] : best) keep.insert(f->record.file);
    TakeOut("", [&](const Found& f) { return !keep.contains(f.record.file); });
  }

  // Segments that were merged into another, unless something still continues them.
  void DropReplaced() {
    std::set<SegmentId> gone;
    for (const Found& merged : found_) {
      if (!merged.damage.empty()) continue;
      const std::set<SegmentId> old(merged.manifest.replaces.begin(),
                                    merged.manifest.replaces.end());
      const bool needed = std::any_of(found_.begin(), found_.end(), [&](const Found& f) {
        return old.contains(f.record.parent) && !old.contains(f.record.id);
      });
      if (!needed) gone.insert(old.begin(), old.end());
    }
    TakeOut("", [&](const Found& f) { return gone.contains(f.record.id); });
    for (const Found& f : found_) segments_[f.record.id] = f.record;
  }

  void CollectAliases() {
    std::map<SegmentId, std::pair<uint64_t, AliasRecord>> last;
    for (const Found& f : found_) {
      for (AliasRecord alias : f.manifest.aliases) {
        if (segments_.contains(alias.id) || alias.n_tokens <= f.record.tokens.begin ||
            alias.n_tokens > f.record.tokens.end) {
          continue;
        }
        alias.segment = f.record.id;
        auto& [sequence, kept] = last[alias.id];
        if (f.record.sequence < sequence) continue;
        sequence = f.record.sequence;
        kept = std::move(alias);
      }
    }
    std::set<SegmentId> named;
    for (auto& [id, entry] : last) {
      named.insert(entry.second.segment);
      aliases_.push_back(std::move(entry.second));
    }
    for (const auto& [id, record] : segments_) named.insert(record.parent);
    // A segment without a name that nothing needs would be freed: give it back its own.
    for (auto& [id, record] : segments_) record.listed |= !named.contains(id);
  }

  // Root first; kCorrupt, saying why, when it does not lead to token 0.
  Result<std::vector<SegmentRecord>> ChainOf(const SegmentRecord& leaf) const {
    std::vector<SegmentRecord> chain{leaf};
    while (!chain.back().is_root()) {
      const auto parent = segments_.find(chain.back().parent);
      if (parent == segments_.end()) {
        return Error{Code::kCorrupt, "segment " + chain.back().id.ToString() +
                                         " lacks the segment it continues, " +
                                         chain.back().parent.ToString()};
      }
      PREFIXD_TRY(CheckContinues(parent->second, chain.back()));
      chain.push_back(parent->second);
    }
    std::reverse(chain.begin(), chain.end());
    return chain;
  }

  Result<std::vector<BlockHash>> HashesOf(const SegmentRecord& record) const {
    PREFIXD_ASSIGN(const auto chain, ChainOf(record));
    PREFIXD_ASSIGN(const auto tokens, ChainTokens(*engine_, dir_, chain, kDirect));
    return OwnHashes(
        BlockHashes(models_.at(record.model).fingerprint, record.tenant, tokens, block_tokens_),
        record.tokens.begin, block_tokens_);
  }

  Status WriteCatalog() {
    const fs::path fresh = dir_ / "catalog.new";
    PREFIXD_TRY(Step("removing what an interrupted recovery left"));
    PREFIXD_TRY(RemoveTree(fresh));
    PREFIXD_TRY(Step("writing the new catalog"));
    PREFIXD_TRY(MakeDirectory(fresh));
    {
      PREFIXD_ASSIGN(const auto catalog,
                     Catalog::Open(fresh, {kStoreFormatVersion, block_tokens_, *store_}));
      for (const auto& [name, model] : models_) {
        PREFIXD_TRY(catalog->PutModel(model));
        ++report_.models;
      }
      catalog->sequences().Saw(last_sequence_);
      PREFIXD_TRY(WriteSegments(*catalog));
    }
    PREFIXD_TRY(SyncDirectory(fresh));
    return SyncDirectory(dir_);
  }

  Status WriteSegments(Catalog& catalog) {
    std::vector<std::pair<SegmentId, std::string>> quarantines;
    CatalogChange change;
    change.put_aliases = aliases_;
    for (const Found& f : found_) {
      const SegmentRecord& record = segments_.at(f.record.id);
      auto hashes = HashesOf(record);
      std::string why = hashes.ok() ? f.damage : hashes.error().message;
      if (!hashes.ok() && hashes.error().code != Code::kCorrupt) return hashes.error();
      change.put.push_back({record, hashes.ok() ? std::move(*hashes) : std::vector<BlockHash>{}});
      if (!why.empty()) quarantines.emplace_back(record.id, std::move(why));
      ++report_.segments;
      report_.bytes += record.file_bytes;
      report_.names += record.listed;
      if (change.put.size() < kSegmentsPerCommit) continue;
      PREFIXD_TRY(catalog.Apply(change));
      change = {};
    }
    PREFIXD_TRY(catalog.Apply(change));
    report_.names += aliases_.size();
    for (const auto& [id, why] : quarantines) {
      PREFIXD_TRY(catalog.SetQuarantine(id, why));
      report_.quarantined.push_back(id.ToString() + ": " + why);
    }
    return {};
  }

  // The next opening frees what the catalog does not know; damaged files are for people to look at.
  Status SetDamagedAside() {
    if (damaged_.empty()) return {};
    const fs::path aside = dir_ / "damaged";
    PREFIXD_TRY(Step("setting damaged files aside"));
    PREFIXD_TRY(MakeDirectory(aside));
    for (const auto& [path, why] : damaged_) {
      PREFIXD_TRY(Rename(path, aside / path.filename()));
      report_.set_aside.push_back(path.filename().string() + ": " + why);
    }
    PREFIXD_TRY(SyncDirectory(aside));
    PREFIXD_TRY(SyncDirectory(dir_));
    return SyncDirectory(dir_ / "segments");
  }

  Status WriteIdentity() {
    if (!report_.identity_rebuilt) return {};
    PREFIXD_TRY(Step("writing STORE"));
    return WriteIdentityFile(dir_, {kStoreFormatVersion, *store_});
  }

  // First the new catalog gets the name that the old one will have, then they change places.
  Status Swap() {
    const fs::path catalog = dir_ / "catalog", kept = FreeName();
    PREFIXD_TRY(Step("naming the new catalog"));
    PREFIXD_TRY(Rename(dir_ / "catalog.new", kept));
    PREFIXD_TRY(SyncDirectory(dir_));
    PREFIXD_TRY(Step("swapping the catalogs"));
    if (::renameat2(AT_FDCWD, kept.c_str(), AT_FDCWD, catalog.c_str(), RENAME_EXCHANGE) != 0) {
      if (errno != EINVAL && errno != ENOSYS) {
        return ErrnoError(errno, "cannot swap " + kept.string() + " and " + catalog.string());
      }
      // The file system cannot: in between there is no catalog, and opening says so.
      const fs::path old = dir_ / "catalog.old";
      PREFIXD_TRY(Rename(catalog, old));
      PREFIXD_TRY(Rename(kept, catalog));
      PREFIXD_TRY(Rename(old, kept));
    }
    PREFIXD_TRY(SyncDirectory(dir_));
    std::error_code ignored;
    if (fs::is_empty(kept, ignored)) return RemoveTree(kept);
    report_.old_catalog = kept;
    return {};
  }

  fs::path FreeName() const {
    for (int n = 1;; ++n) {
      const fs::path name = dir_ / ("catalog.lost-" + std::to_string(n));
      if (!Exists(name)) return name;
    }
  }

  Status Free() {
    report_.freed = superseded_.size();
    report_.unfinished = unfinished_.size();
    PREFIXD_TRY(Step("freeing files"));
    for (const fs::path& path : superseded_) PREFIXD_TRY(RemoveFile(path));
    if (options_.prune) {
      for (const fs::path& path : unfinished_) PREFIXD_TRY(RemoveFile(path));
    }
    return SyncDirectory(dir_ / "segments");
  }

  const RecoverOptions& options_;
  const fs::path dir_;
  const Progress& progress_;
  const std::unique_ptr<IoEngine> engine_;
  std::optional<Uuid> store_;
  uint64_t done_pages_ = 0, total_pages_ = 0;
  uint64_t last_sequence_ = 0;
  uint32_t block_tokens_ = StoreOptions{}.block_tokens;
  std::map<Uuid, std::vector<fs::path>> stores_;
  std::vector<Found> found_;
  std::vector<fs::path> superseded_, unfinished_;
  std::vector<std::pair<fs::path, std::string>> damaged_;  // and why
  std::map<std::string, ModelRecord> models_;
  std::map<SegmentId, SegmentRecord> segments_;  // what the new catalog will know
  std::vector<AliasRecord> aliases_;
  RecoverReport report_;
};

}  // namespace

Result<RecoverReport> RecoverCatalog(const RecoverOptions& options, const Progress& progress) {
  return Rebuilder(options, progress).Run();
}

}  // namespace prefixd::storage
