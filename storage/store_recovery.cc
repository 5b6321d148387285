// What Open does with a directory that may have been left at any moment, and what Verify does with
// a living one.
#include <dirent.h>

#include <algorithm>
#include <filesystem>

#include "storage/crash_point.h"
#include "storage/errors.h"
#include "storage/store_core.h"

namespace prefixd::storage {
namespace fs = std::filesystem;

Status StoreCore::Recover() {
  PREFIXD_TRY(LoadSegments());
  CrashPoint("recover.loaded");
  PREFIXD_TRY(AdoptSegments());
  PREFIXD_TRY(SweepSegmentFiles());
  CrashPoint("recover.swept");
  CheckSegments();
  CrashPoint("recover.done");
  return {};
}

Status StoreCore::LoadSegments() {
  PREFIXD_ASSIGN(std::vector<ModelRecord> models, catalog->LoadModels());
  for (ModelRecord& model : models) models_.emplace(model.name, std::move(model));
  PREFIXD_ASSIGN(std::vector<CatalogSegment> segments, catalog->LoadSegments());
  // A parent's commit came before its children's.
  std::sort(segments.begin(), segments.end(),
            [](const auto& a, const auto& b) { return a.record.sequence < b.record.sequence; });
  for (const CatalogSegment& segment : segments) {
    const auto model = models_.find(segment.record.model);
    if (model == models_.end()) {
      return Error{Code::kCorrupt, "catalog: segment " + segment.record.id.ToString() +
                                       " is of the unknown model '" + segment.record.model + "'"};
    }
    tree.Insert(segment, PrefixScope(model->second.fingerprint, segment.record.tenant));
    next_sequence = segment.record.sequence + 1;
  }
  return {};
}

// Files that the catalog does not know are puts that never committed, or removals cut short.
Status StoreCore::SweepSegmentFiles() {
  const fs::path dir = options.dir / "segments";
  std::error_code error;
  std::vector<fs::directory_entry> entries;
  for (auto it = fs::directory_iterator(dir, error); !error && it != fs::directory_iterator();
       it.increment(error)) {
    entries.push_back(*it);
  }
  if (error) return ErrnoError(error.value(), "cannot list " + dir.string());
  uint64_t removed = 0;
  for (const fs::directory_entry& entry : entries) {
    const std::string name = entry.path().filename().string();
    const auto parsed = ParseSegmentsEntry(name);
    const bool unfinished = name.ends_with(".tmp");
    if (!parsed && !unfinished) {
      LogWarning("left alone: " + entry.path().string() + " is not a file of the store");
      continue;
    }
    if (unfinished || !tree.Info(parsed->id).ok()) {
      CrashPoint("recover.before_orphan");
      PREFIXD_TRY(RemoveFile(entry.path()));
      ++removed;
    } else if (!parsed->blob.empty()) {
      blobs->Register(parsed->id, parsed->blob, entry.file_size(error));
    }
  }
  if (removed == 0) return {};
  recovered_orphans = removed;
  CrashPoint("recover.before_directory_sync");
  LogInfo("recovery freed " + std::to_string(removed) + " unfinished or orphaned files");
  return SyncDirectory(dir);
}

void StoreCore::CheckSegments() {
  for (const SegmentRecord& record : tree.Records()) {
    Status checked =
        SegmentFile::Check(*engine, SegmentPath(options.dir, record.id), record, direct);
    if (checked.ok()) continue;
    if (checked.error().code == Code::kCorrupt) {
      Quarantine(record.id, checked.error().message);
    } else {
      // Reads will meet the same error, or not: the bytes themselves are not known to be bad.
      LogWarning("segment " + record.id.ToString() + ": " + checked.error().message);
    }
  }
}

Status StoreCore::VerifySegment(const SegmentRecord& record, VerifyReport& report,
                                const std::function<bool(uint64_t)>& page_done) {
  const std::string who = "segment " + record.id.ToString();
  Status sound = [&]() -> Status {
    // Opened afresh: what is in memory may be better than what is on the disk.
    PREFIXD_ASSIGN(const auto file,
                   SegmentFile::Open(*engine, SegmentPath(options.dir, record.id), record, direct));
    PREFIXD_TRY(VerifyAllPages(services, *file, page_done));
    report.pages += file->layout().table_page;
    report.bytes += record.file_bytes;
    return {};
  }();
  if (!sound.ok() && sound.error().code == Code::kCancelled) return sound;
  ++report.segments;
  if (!sound.ok()) {
    report.damaged.push_back(who + ": " + sound.error().message);
    if (sound.error().code == Code::kCorrupt) {
      files.Erase(record.id);
      Quarantine(record.id, sound.error().message);
    }
  } else {
    LiftQuarantine(record.id);
    CrashPoint("verify.sound");
  }
  for (const std::string& name : blobs->List(record.id)) {
    ++report.blobs;
    const auto checked = blobs->Check(record.id, name);
    if (checked.ok()) {
      report.bytes += *checked;
    } else {
      report.damaged.push_back(who + ", blob " + name + ": " + checked.error().message);
    }
  }
  return {};
}

Result<VerifyReport> StoreCore::Verify(const SegmentId* only, const Progress& progress) {
  std::vector<SegmentRecord> records;
  for (SegmentRecord& record : tree.Records()) {
    if (only == nullptr || record.id == *only) records.push_back(std::move(record));
  }
  if (only != nullptr && records.empty()) {
    return Error{Code::kNotFound, "no stored prefix " + only->ToString()};
  }
  uint64_t done = 0, total = 0;
  for (const SegmentRecord& record : records) total += record.file_bytes / kPageBytes;
  VerifyReport report;
  for (const SegmentRecord& record : records) {
    const uint64_t before = done;
    const auto pin = tree.PinSegment(record.id);
    if (!pin.ok()) continue;  // removed meanwhile
    PREFIXD_TRY(VerifySegment(record, report, [&](uint64_t n) {
      done += n;
      return !progress || progress(done, total, "pages");
    }));
    done = before + record.file_bytes / kPageBytes;
    if (progress && !progress(done, total, "pages")) {
      return Error{Code::kCancelled, "verification was stopped"};
    }
  }
  return report;
}

}  // namespace prefixd::storage
