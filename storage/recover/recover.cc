#include "storage/recover/recover.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <optional>
#include <utility>

#include "storage/catalog/catalog.h"
#include "storage/catalog/segment_inspect.h"
#include "storage/catalog/store_dir.h"
#include "storage/catalog/store_keys.h"
#include "storage/io/errors.h"
#include "storage/io/together.h"
#include "storage/recover/recover_choose.h"
#include "storage/recover/recover_scan.h"

namespace prefixd::storage {
namespace fs = std::filesystem;
namespace {

constexpr size_t kSegmentsPerCommit = 256;

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
      : options_(options),
        dir_(options.dir),
        progress_(progress),
        // Rows are read ahead of their verification; small reads are done by whoever waits for
        // them.
        engine_(options.verify_data ? NewThreadEngine({}) : NewInlineEngine()) {}

  Result<RecoverReport> Run() {
    if (!Exists(dir_ / "segments") && !Exists(dir_ / "STORE")) {
      return Error{Code::kNotFound, "there is no prefixd store in " + dir_.string()};
    }
    PREFIXD_TRY(RefuseAsRoot(dir_));
    if (!options_.encryption_key_file.empty()) {
      PREFIXD_ASSIGN(keys_, KeyRing::Read(options_.encryption_key_file));
    }
    PREFIXD_ASSIGN(const DirLock lock, DirLock::Acquire(dir_));
    PREFIXD_TRY(CreateStoreDir(dir_));
    PREFIXD_TRY(ReadIdentity());
    PREFIXD_TRY(Scan());
    identity_ = stored_;
    identity_.store = *store_;
    PREFIXD_ASSIGN(secret_, RecoverStoreKeys(keys_.get(), &identity_));
    choice_ = ChooseSegments(scan_);
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

  // Finds what there is, and refuses what cannot be read: that is not damaged.
  Status Scan() {
    if (!HasKeysOf(keys_.get(), stored_)) PREFIXD_TRY(RefuseMissingKeys(KeyedFiles::kAll));
    auto scan = ScanSegments(*engine_, dir_, options_.verify_data, keys_.get(), progress_);
    if (!scan.ok()) {
      // Where a key is missing, the sentence is to say how many files need it.
      if (scan.error().code == Code::kFailedPrecondition) {
        PREFIXD_TRY(RefuseMissingKeys(KeyedFiles::kAll));
      }
      return std::move(scan).error();
    }
    scan_ = *std::move(scan);
    PREFIXD_TRY(CheckIdentity());
    // The scan has met the keys of all segments. Those of blobs are in STORE, if that is whole.
    return report_.identity_rebuilt ? RefuseMissingKeys(KeyedFiles::kBlobs) : Status();
  }

  Status RefuseMissingKeys(KeyedFiles which) const {
    return storage::RefuseMissingKeys(dir_, keys_.get(), which, progress_);
  }

  Status ReadIdentity() {
    if (!Exists(dir_ / "STORE")) return {};
    auto identity = ReadIdentityFile(dir_);
    if (identity.ok()) {
      store_ = identity->store;
      stored_ = *std::move(identity);
      return {};
    }
    return identity.error().code == Code::kCorrupt ? Status() : Status(identity.error());
  }

  // Every header names its store. Without STORE the headers must agree.
  Status CheckIdentity() {
    // A STORE that no segment agrees with was written after the loss.
    if (store_ && (scan_.stores.empty() || scan_.stores.contains(*store_))) {
      std::erase_if(scan_.found, [&](const FoundSegment& f) {
        if (f.store == *store_) return false;
        scan_.damaged.emplace_back(f.path, "it belongs to another store");
        return true;
      });
      return {};
    }
    report_.identity_rebuilt = true;
    if (scan_.stores.size() == 1) {
      store_ = scan_.stores.begin()->first;
      return {};
    }
    if (scan_.stores.empty()) {
      return Error{Code::kNotFound, "the STORE file of " + dir_.string() +
                                        " is lost and no segment verifies that could say whose "
                                        "store it was; start from an empty directory"};
    }
    std::string files;
    for (const auto& [store, paths] : scan_.stores)
      files += " " + paths.front().filename().string();
    return Error{Code::kCorrupt, "the segments in " + dir_.string() +
                                     " belong to different stores (for example" + files +
                                     "); move those of the other store away, or restore STORE"};
  }

  // Returns the chain, root first; kCorrupt, with the reason, when it does not lead to token 0.
  Result<std::vector<SegmentRecord>> ChainOf(const SegmentRecord& leaf) const {
    std::vector<SegmentRecord> chain{leaf};
    while (!chain.back().is_root()) {
      const auto parent = choice_.segments.find(chain.back().parent);
      if (parent == choice_.segments.end()) {
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

  // What the catalog knows of a segment's token ids.
  struct KnownTokens {
    std::vector<BlockHash> hashes;
    std::vector<uint32_t> lead;
  };
  Result<KnownTokens> TokensOf(const SegmentRecord& record) const {
    PREFIXD_ASSIGN(const auto chain, ChainOf(record));
    PREFIXD_ASSIGN(const auto tokens,
                   ChainTokens(*engine_, dir_, chain, /*direct=*/false, keys_.get()));
    const auto key = secret_ ? secret_->hash_key() : std::span<const uint8_t>();
    KnownTokens known;
    known.hashes = OwnHashes(BlockHashes(choice_.models.at(record.model).fingerprint, record.tenant,
                                         tokens, choice_.block_tokens, key),
                             record.tokens.begin, choice_.block_tokens);
    if (record.is_root()) known.lead = LeadOf(tokens, choice_.block_tokens);
    return known;
  }

  Status WriteCatalog() {
    const fs::path fresh = dir_ / "catalog.new";
    PREFIXD_TRY(Step("removing what an interrupted recovery left"));
    PREFIXD_TRY(RemoveTree(fresh));
    PREFIXD_TRY(Step("writing the new catalog"));
    PREFIXD_TRY(MakeDirectory(fresh));
    {
      PREFIXD_ASSIGN(
          const auto catalog,
          Catalog::Open(fresh, {kStoreFormatVersion, choice_.block_tokens, *store_}, {}, secret_));
      for (const auto& [name, model] : choice_.models) {
        PREFIXD_TRY(catalog->PutModel(model));
        ++report_.models;
      }
      catalog->sequences().Saw(choice_.last_sequence);
      PREFIXD_TRY(WriteSegments(*catalog));
    }
    PREFIXD_TRY(SyncDirectory(fresh));
    return SyncDirectory(dir_);
  }

  Status WriteSegments(Catalog& catalog) {
    std::vector<std::pair<SegmentId, std::string>> quarantines;
    std::vector<AliasRecord> aliases = choice_.aliases;
    std::vector<Result<KnownTokens>> known;
    size_t begin = 0;
    do {
      const size_t n = std::min(kSegmentsPerCommit, scan_.found.size() - begin);
      known.assign(n, KnownTokens{});
      PREFIXD_TRY(Together(n, kReadsAtOnce, [&](size_t i) -> Status {
        const SegmentRecord& record = choice_.segments.at(scan_.found[begin + i].record.id);
        known[i] = TokensOf(record);
        if (!known[i].ok()) known[i] = TokensOf(record);  // a fault may be transient
        return {};
      }));
      CatalogChange change;
      change.put_aliases = std::exchange(aliases, {});
      for (size_t i = 0; i < n; ++i) {
        const FoundSegment& f = scan_.found[begin + i];
        SegmentRecord& record = choice_.segments.at(f.record.id);
        std::string why = known[i].ok() ? f.damage : known[i].error().message;
        if (!known[i].ok() && known[i].error().code != Code::kCorrupt) {
          return CannotRead(f.path, known[i].error());
        }
        if (known[i].ok()) record.lead = std::move(known[i]->lead);
        change.put.push_back(
            {record, known[i].ok() ? std::move(known[i]->hashes) : std::vector<BlockHash>{}});
        if (!why.empty()) quarantines.emplace_back(record.id, std::move(why));
        ++report_.segments;
        report_.bytes += record.file_bytes;
        report_.names += record.listed;
      }
      PREFIXD_TRY(catalog.Apply(change));
      begin += n;
    } while (begin < scan_.found.size());
    report_.names += choice_.aliases.size();
    for (const auto& [id, why] : quarantines) {
      PREFIXD_TRY(catalog.SetQuarantine(id, why));
      report_.quarantined.push_back(id.ToString() + ": " + why);
    }
    return {};
  }

  // The next opening frees files that the catalog does not know; people can look at damaged ones,
  // so these stay.
  Status SetDamagedAside() {
    if (scan_.damaged.empty()) return {};
    const fs::path aside = dir_ / "damaged";
    PREFIXD_TRY(Step("setting damaged files aside"));
    PREFIXD_TRY(MakeDirectory(aside));
    for (const auto& [path, why] : scan_.damaged) {
      PREFIXD_TRY(Rename(path, aside / path.filename()));
      report_.set_aside.push_back(path.filename().string() + ": " + why);
    }
    PREFIXD_TRY(SyncDirectory(aside));
    PREFIXD_TRY(SyncDirectory(dir_));
    return SyncDirectory(dir_ / "segments");
  }

  Status WriteIdentity() {
    if (!report_.identity_rebuilt && identity_ == stored_) return {};
    PREFIXD_TRY(Step("writing STORE"));
    return WriteIdentityFile(dir_, identity_);
  }

  // The new catalog first gets the name that the old one will have, then the two change places.
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
      // This file system cannot exchange names: in between there is no catalog, and opening reports
      // that.
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
    report_.freed = choice_.superseded.size();
    report_.unfinished = scan_.unfinished.size();
    PREFIXD_TRY(Step("freeing files"));
    for (const fs::path& path : choice_.superseded) PREFIXD_TRY(RemoveFile(path));
    if (options_.prune) {
      for (const fs::path& path : scan_.unfinished) PREFIXD_TRY(RemoveFile(path));
    }
    return SyncDirectory(dir_ / "segments");
  }

  const RecoverOptions& options_;
  const fs::path dir_;
  const Progress& progress_;
  const std::unique_ptr<IoEngine> engine_;
  std::optional<Uuid> store_;
  StoreIdentity stored_, identity_;  // what STORE says, and what it shall say
  std::shared_ptr<const KeyRing> keys_;
  std::shared_ptr<const StoreSecret> secret_;
  SegmentScan scan_;
  RecoverChoice choice_;
  RecoverReport report_;
};

}  // namespace

Result<RecoverReport> RecoverCatalog(const RecoverOptions& options, const Progress& progress) {
  return Rebuilder(options, progress).Run();
}

}  // namespace prefixd::storage
