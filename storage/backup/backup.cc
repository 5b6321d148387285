#include "storage/backup/backup.h"

#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <map>
#include <set>
#include <utility>

#include "storage/backup/copy_file.h"
#include "storage/backup/manifest.h"
#include "storage/catalog/missing_files.h"
#include "storage/catalog/segment_inspect.h"
#include "storage/catalog/store_dir.h"
#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/io/io_engine.h"
#include "storage/read/page_reader.h"
#include "storage/segment/unix_time.h"

namespace prefixd::storage {
namespace fs = std::filesystem;
namespace {

constexpr std::string_view kLostAndFound = "lost+found";

struct Source {
  std::string name;
  uint64_t bytes = 0, inode = 0;
  int64_t changed_ns = 0;
};

Status MakeBackupDirectory(const fs::path& path) {
  if (::mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) return {};
  return ErrnoError(errno, "cannot create the directory " + path.string());
}

// Lists the store's files that a backup holds. Unfinished and foreign files are none.
Result<std::vector<Source>> SourcesIn(const fs::path& store) {
  std::vector<std::string> names = {"STORE"};
  for (const char* folder : {"catalog", "segments"}) {
    PREFIXD_ASSIGN(const auto entries, ListDirectory(store / folder));
    for (const fs::directory_entry& entry : entries) {
      const std::string name = entry.path().filename().string();
      const bool segments = std::string_view(folder) == "segments";
      if (segments ? ParseSegmentsEntry(name).has_value() : name != "LOCK") {
        names.push_back(std::string(folder) + "/" + name);
      }
    }
  }
  std::vector<Source> out;
  for (std::string& name : names) {
    struct stat st {};
    if (::lstat((store / name).c_str(), &st) != 0) {
      return ErrnoError(errno, "cannot look at " + (store / name).string());
    }
    if (!S_ISREG(st.st_mode)) continue;
    out.push_back({std::move(name), static_cast<uint64_t>(st.st_size),
                   static_cast<uint64_t>(st.st_ino),
                   int64_t{st.st_mtim.tv_sec} * 1'000'000'000 + st.st_mtim.tv_nsec});
  }
  return out;
}

// Whether a store can do without the file: a segment, which is quarantined then, or what is derived
// of one.
bool IsOfSegment(std::string_view name) { return name.starts_with("segments/"); }

bool IsNumber(std::string_view text) {
  return !text.empty() && text.find_first_not_of("0123456789") == text.npos;
}

// Whether a backup may have made a file of this name in data/, or beside it: nothing else is
// removed.
bool IsKeptFile(std::string_view name) {
  const size_t dash = name.find('-');
  return dash != name.npos && IsNumber(name.substr(0, dash)) && IsNumber(name.substr(dash + 1));
}
bool IsManifest(std::string_view name) {
  if (name.ends_with(".tmp")) name.remove_suffix(4);
  return name.starts_with("manifest-") && IsNumber(name.substr(9));
}

// Whether a directory that is no backup yet holds nothing but what an interrupted first one left.
Status CheckUnused(const fs::path& dir) {
  const auto check = [&](const fs::path& in, const auto& own) -> Status {
    PREFIXD_ASSIGN(const auto entries, ListDirectory(in));
    for (const fs::directory_entry& entry : entries) {
      if (own(entry.path().filename().string())) continue;
      return Error{Code::kFailedPrecondition,
                   dir.string() + " is no backup and holds other files (" + entry.path().string() +
                       "); take an empty directory"};
    }
    return {};
  };
  PREFIXD_TRY(check(dir, [](std::string_view name) {
    return name == "lock" || name == "data" || name == "BACKUP.tmp" || name == kLostAndFound ||
           IsManifest(name);
  }));
  std::error_code failed;
  return fs::is_directory(dir / "data", failed) ? check(dir / "data", IsKeptFile) : Status();
}

// Checks every page of a segment file against the checksums inside it.
Status VerifyCopy(IoEngine& engine, const fs::path& path, const KeyRing* keys) {
  PREFIXD_ASSIGN(const InspectedSegment segment,
                 InspectSegment(engine, path, /*direct=*/true, keys));
  std::atomic<uint64_t> bytes_read{0}, failures{0};
  ReadServices services;
  services.engine = &engine;
  services.bytes_read = &bytes_read;
  services.checksum_failures = &failures;
  services.on_corrupt = [](const SegmentId&, const std::string&) {};
  return VerifyAllPages(services, *segment.file, [](uint64_t) { return true; });
}

class Writer {
 public:
  Writer(const fs::path& from, const fs::path& to, const Progress& progress, const KeyRing* keys,
         bool verify)
      : from_(from),
        to_(to),
        progress_(progress),
        keys_(keys),
        verify_(verify),
        engine_(NewThreadEngine({})) {}

  Result<BackupReport> Run() {
    PREFIXD_ASSIGN(const StoreIdentity identity, ReadIdentityFile(from_));
    PREFIXD_TRY(MakeBackupDirectory(to_));
    std::error_code failed;
    if (!fs::exists(to_ / "BACKUP", failed) && !failed) PREFIXD_TRY(CheckUnused(to_));
    PREFIXD_TRY(MakeBackupDirectory(to_ / "data"));
    PREFIXD_ASSIGN(const DirLock lock, DirLock::Acquire(to_));
    auto before = ReadBackup(to_);
    if (!before.ok() && before.error().code != Code::kNotFound) return before.error();
    if (before.ok() && before->store != identity.store) {
      return Error{Code::kFailedPrecondition,
                   to_.string() + " is the backup of another store; take another directory"};
    }
    if (before.ok()) last_ = *std::move(before);
    PREFIXD_TRY(Sweep(last_));  // what an interrupted backup left
    report_.dropped_files = 0;
    manifest_.store = identity.store;
    manifest_.generation = report_.generation = last_.generation + 1;
    manifest_.created_unix_ms = NowUnixMs();
    PREFIXD_ASSIGN(const std::vector<Source> sources, SourcesIn(from_));
    PREFIXD_TRY(Reuse(sources));
    PREFIXD_TRY(KeepMissing());
    if (Status copied = CopyAll(); !copied.ok()) {
      report_.dropped_files = 0;
      (void)Sweep(last_);  // what was copied is of no use, and may have filled the disk
      return copied.error();
    }
    CrashPoint("backup.counts");
    PREFIXD_TRY(Sweep(manifest_));
    report_.files = manifest_.files.size();
    for (const BackupFile& file : manifest_.files) report_.bytes += file.bytes;
    return std::move(report_);
  }

 private:
  // Copies what is new and makes it count.
  Status CopyAll() {
    PREFIXD_TRY(CopyNew());
    PREFIXD_TRY(SyncDirectory(to_ / "data"));
    CrashPoint("backup.copied");
    return WriteBackupManifest(to_, manifest_);
  }

  // Takes over what the last generation holds, and notes the rest.
  Status Reuse(const std::vector<Source>& sources) {
    for (const BackupFile& file : last_.files) known_[file.name] = &file;
    std::error_code failed;
    for (const Source& source : sources) {
      const auto it = known_.find(source.name);
      const bool same = it != known_.end() && it->second->bytes == source.bytes &&
                        it->second->inode == source.inode &&
                        it->second->changed_ns == source.changed_ns &&
                        fs::file_size(to_ / "data" / it->second->kept_as, failed) == source.bytes &&
                        (!verify_ || IsWhole(*it->second));
      if (same) {
        manifest_.files.push_back(*it->second);
      } else {
        new_.push_back(source);
        total_ += source.bytes;
      }
    }
    return {};
  }

  bool IsWhole(const BackupFile& file) const {
    const auto copy = DigestFile(to_ / "data" / file.kept_as);
    return copy.ok() && copy->digest == file.digest;
  }

  // What the store's catalog names and its directory has lost is wanted most of all.
  Status KeepMissing() {
    PREFIXD_ASSIGN(const std::vector<std::string> missing, ReadMissingFiles(from_));
    for (const std::string& name : missing) Note(name, "the store has lost the file");
    return {};
  }

  void Note(const std::string& name, const std::string& why) {
    const bool kept = name.ends_with(".seg") && KeepEarlier(name);
    report_.damaged.push_back(name + ": " + why +
                              (kept ? " (the backup keeps its earlier copy)" : ""));
  }

  Status CopyNew() {
    const BytesDone done = [this](uint64_t bytes) {
      done_ += bytes;
      return !progress_ || progress_(std::min(done_, total_), total_, "bytes");
    };
    for (size_t i = 0; i < new_.size(); ++i) {
      const Source& source = new_[i];
      BackupFile file{source.name,
                      std::to_string(manifest_.generation) + "-" + std::to_string(i),
                      0,
                      {},
                      source.inode,
                      source.changed_ns};
      const fs::path to = to_ / "data" / file.kept_as;
      // A disk that begins to fail is when a backup is wanted most: the rest goes on.
      bool unreadable = false;
      const auto copied = CopyFile(from_ / source.name, to, done, &unreadable);
      if (unreadable && IsOfSegment(source.name)) {
        PREFIXD_TRY(RemoveFile(to));
        Note(source.name, copied.error().message);
        continue;
      }
      if (!copied.ok()) return copied.error();
      CrashPoint("backup.file");
      const Status sound = Verify(source.name, to, *copied);
      if (!sound.ok() && sound.error().code == Code::kCorrupt && source.name.ends_with(".seg")) {
        PREFIXD_TRY(RemoveFile(to));
        Note(source.name, sound.error().message);
        continue;
      }
      if (!sound.ok()) return sound;
      file.bytes = copied->bytes;
      file.digest = copied->digest;
      ++report_.new_files;
      report_.new_bytes += copied->bytes;
      manifest_.files.push_back(std::move(file));
    }
    return {};
  }

  // A segment file never changes, so what the last generation holds of it is as good as its file
  // was, if it still verifies.
  bool KeepEarlier(const std::string& name) {
    const auto it = known_.find(name);
    if (it == known_.end()) return false;
    const Status sound = VerifyCopy(*engine_, to_ / "data" / it->second->kept_as, keys_);
    // Without its key, an encrypted one is held against what was read then.
    const bool whole =
        sound.ok() || (sound.error().code == Code::kFailedPrecondition && IsWhole(*it->second));
    if (whole) manifest_.files.push_back(*it->second);
    return whole;
  }

  Status Verify(const std::string& name, const fs::path& copy, const Copied& copied) {
    if (name.ends_with(".seg")) {
      Status sound = VerifyCopy(*engine_, copy, keys_);
      // It is encrypted and its key is not here, or a newer prefixd wrote it.
      if (sound.ok() || sound.error().code != Code::kFailedPrecondition) return sound;
    }
    PREFIXD_ASSIGN(const Copied again, DigestFile(copy));
    if (again.digest == copied.digest) return {};
    return Error{Code::kIo, "the disk did not keep what was written to " + copy.string()};
  }

  // Removes every file of a backup that the generation does not need.
  Status Sweep(const BackupManifest& kept) {
    std::set<std::string> needed;
    for (const BackupFile& file : kept.files) needed.insert(file.kept_as);
    PREFIXD_ASSIGN(const auto entries, ListDirectory(to_ / "data"));
    for (const fs::directory_entry& entry : entries) {
      const std::string name = entry.path().filename().string();
      if (needed.contains(name) || !IsKeptFile(name)) continue;
      PREFIXD_TRY(RemoveFile(entry.path()));
      ++report_.dropped_files;
    }
    PREFIXD_ASSIGN(const auto manifests, ListDirectory(to_));
    const fs::path own = BackupManifestPath(to_, kept.generation);
    for (const fs::directory_entry& entry : manifests) {
      const std::string name = entry.path().filename().string();
      if (IsManifest(name) && entry.path().filename() != own.filename()) {
        PREFIXD_TRY(RemoveFile(entry.path()));
      }
    }
    return {};
  }

  const fs::path &from_, &to_;
  const Progress& progress_;
  const KeyRing* const keys_;
  const bool verify_;
  const std::unique_ptr<IoEngine> engine_;
  BackupManifest last_, manifest_;
  std::map<std::string, const BackupFile*> known_;  // of last_, by name
  std::vector<Source> new_;
  uint64_t done_ = 0, total_ = 0;
  BackupReport report_;
};

// Every freshly made ext4 has it.
bool IsLostAndFound(const fs::directory_entry& entry) {
  return entry.path().filename() == kLostAndFound;
}

// Whether nothing lies where a backup is to be restored.
bool Unused(const fs::path& dir) {
  std::error_code failed;
  if (!fs::exists(dir, failed) && !failed) return true;
  const auto entries = ListDirectory(dir);
  return entries.ok() && std::ranges::all_of(*entries, IsLostAndFound);
}

Result<RestoreReport> RestoreInto(const fs::path& from, const fs::path& to,
                                  const Progress& progress) {
  // A backup that may not be written to is not written to by others either, as far as this goes.
  const auto lock = DirLock::Acquire(from);
  if (!lock.ok() && lock.error().code == Code::kFailedPrecondition) return lock.error();
  PREFIXD_ASSIGN(const BackupManifest manifest, ReadBackup(from));
  RestoreReport report{manifest.generation, manifest.created_unix_ms, 0, 0, {}};
  uint64_t total = 0;
  for (const BackupFile& file : manifest.files) total += file.bytes;
  const BytesDone done = [&](uint64_t bytes) {
    report.bytes += bytes;
    return !progress || progress(std::min(report.bytes, total), total, "bytes");
  };
  PREFIXD_TRY(CreateStoreDir(to));
  // No daemon takes it for a new store meanwhile.
  PREFIXD_ASSIGN(const DirLock own, DirLock::Acquire(to));
  std::error_code failed;
  if (fs::exists(to / "STORE", failed)) {
    return Error{Code::kFailedPrecondition, to.string() + " became a store meanwhile"};
  }
  // STORE comes last: a directory without it is refused as a store.
  std::vector<const BackupFile*> order;
  for (const BackupFile& file : manifest.files) order.push_back(&file);
  std::ranges::stable_sort(order, {}, [](const BackupFile* f) { return f->name == "STORE"; });
  for (const BackupFile* file : order) {
    const fs::path kept = from / "data" / file->kept_as;
    bool unreadable = false;
    const auto copied = CopyFile(kept, to / file->name, done, &unreadable);
    if (!copied.ok() && !unreadable) return copied.error();
    if (copied.ok() && copied->bytes == file->bytes && copied->digest == file->digest) {
      ++report.files;
      continue;
    }
    const std::string why = copied.ok() ? kept.string() + " is damaged" : copied.error().message;
    if (!IsOfSegment(file->name)) {
      return Error{Code::kCorrupt, "the backup of " + file->name + " is of no use (" + why +
                                       "); restore another backup"};
    }
    PREFIXD_TRY(RemoveFile(to / file->name));
    report.damaged.push_back(file->name + ": " + why);
  }
  for (const fs::path& dir : {to / "catalog", to / "segments", to}) PREFIXD_TRY(SyncDirectory(dir));
  return report;
}

}  // namespace

Result<BackupReport> WriteBackup(const fs::path& from, const fs::path& to, const Progress& progress,
                                 const KeyRing* keys, bool verify) {
  return Writer(from, to, progress, keys, verify).Run();
}

Result<RestoreReport> RestoreBackup(const fs::path& from, const fs::path& to,
                                    const Progress& progress) {
  std::error_code failed;
  if (!fs::exists(from / "BACKUP", failed)) {
    if (failed) return ErrnoError(failed.value(), "cannot look into " + from.string());
    return Error{Code::kNotFound, "there is no backup in " + from.string()};
  }
  if (!Unused(to)) {
    return Error{Code::kFailedPrecondition,
                 to.string() + " is not empty; a backup is restored into a new directory"};
  }
  PREFIXD_TRY(RefuseAsRoot(to));  // an empty directory may be the daemon's
  auto report = RestoreInto(from, to, progress);
  // Who has the directory by now has filled it.
  const bool ours = report.ok() || report.error().code != Code::kFailedPrecondition;
  if (!report.ok() && ours) {
    for (const auto& entry : fs::directory_iterator(to, failed)) {
      if (!IsLostAndFound(entry)) fs::remove_all(entry, failed);
    }
  }
  return report;
}

}  // namespace prefixd::storage
