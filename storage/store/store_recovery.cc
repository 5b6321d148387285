// Implements Open's recovery of a directory that may have been left at any moment, and Verify for
// an open store.
#include <algorithm>
#include <filesystem>
#include <set>

#include "base/call_scope.h"
#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/store/store_core.h"

namespace prefixd::storage {
namespace fs = std::filesystem;

namespace {

// Whether a verification ended for a reason that says nothing about what is stored.
bool Unread(const Error& error) {
  return EndedEarly(error) || error.code == Code::kResourceExhausted;
}

}  // namespace

Status StoreCore::Recover() {
  if (Status loaded = LoadSegments(); !loaded.ok()) {
    return WithHowToRecover(loaded.error(), options.dir);
  }
  PREFIXD_TRY(AdoptLostCommits());
  PREFIXD_TRY(SweepSegmentFiles());
  CrashPoint("recover.swept");
  CheckSegments();
  FreeUnneeded();
  return {};
}

Status StoreCore::LoadSegments() {
  PREFIXD_ASSIGN(std::vector<ModelRecord> models, catalog->LoadModels());
  for (ModelRecord& model : models) models_.emplace(model.name, std::move(model));
  PREFIXD_ASSIGN(std::vector<CatalogSegment> segments, catalog->LoadSegments());
  // A child begins behind its parent's beginning, so this sorts parents first; sequence numbers
  // would not, because they change when files are rewritten.
  std::sort(segments.begin(), segments.end(), [](const auto& a, const auto& b) {
    return a.record.tokens.begin < b.record.tokens.begin;
  });
  for (const CatalogSegment& segment : segments) {
    const auto model = models_.find(segment.record.model);
    const BlockHash scope = model == models_.end()
                                ? BlockHash{}
                                : PrefixScope(model->second.fingerprint, segment.record.tenant);
    tree.Insert({segment, scope, CheckRelations(segment.record).ok()});
    catalog->sequences().Saw(segment.record.sequence);
  }
  PREFIXD_ASSIGN(const std::vector<AliasRecord> aliases, catalog->LoadAliases());
  for (const AliasRecord& alias : aliases) tree.InsertAlias(alias);
  return {};
}

// Checks what records say of one another, which no segment file can show. The message of kCorrupt
// says what is wrong. The error costs this segment and those below it, not the store.
Status StoreCore::CheckRelations(const SegmentRecord& record) const {
  const auto wrong = [](std::string what) { return Error{Code::kCorrupt, std::move(what)}; };
  if (record.tokens.size() == 0) return wrong("its catalog record is damaged");
  {
    std::lock_guard guard(mutex_);
    if (!models_.contains(record.model)) {
      return wrong("the catalog does not know its model '" + record.model + "'");
    }
  }
  if (record.is_root()) return {};
  const auto parent = tree.Record(record.parent);
  if (!parent.ok()) {
    return wrong("the segment it continues, " + record.parent.ToString() + ", is not stored");
  }
  if (parent->model != record.model || parent->tenant != record.tenant) {
    return wrong("the segment it continues, " + record.parent.ToString() +
                 ", is of another model or tenant");
  }
  if (parent->lineage != Lineage{} && parent->lineage != record.lineage) {
    return wrong("it does not bear the lineage of the derived rows that it continues, of segment " +
                 record.parent.ToString());
  }
  // A child that begins behind its parent's beginning cannot close a circle.
  if (record.tokens.begin <= parent->tokens.begin || record.tokens.begin > parent->tokens.end) {
    return wrong("it begins at token " + std::to_string(record.tokens.begin) +
                 ", but the segment it continues holds tokens " +
                 std::to_string(parent->tokens.begin) + " to " +
                 std::to_string(parent->tokens.end));
  }
  return {};
}

// Returns kCorrupt when the file holds rows of another model or geometry than its record says.
Status StoreCore::CheckModel(const SegmentRecord& record, const SegmentHeader& header) const {
  std::lock_guard guard(mutex_);
  const auto it = models_.find(record.model);
  if (it != models_.end()) {
    const ModelRecord& model = it->second;
    if (header.model == model.fingerprint && header.IsOf(model.geometry)) return {};
  }
  return Error{Code::kCorrupt, "its rows are not of the model '" + record.model + "'"};
}

// Files that the catalog does not know are puts that never committed, or interrupted removals.
Status StoreCore::SweepSegmentFiles() {
  const fs::path dir = options.dir / "segments";
  PREFIXD_ASSIGN(const auto entries, ListDirectory(dir));
  std::error_code error;
  std::set<Uuid> known_files;
  bool records_damaged = false;
  for (const SegmentRecord& record : tree.Records()) {
    known_files.insert(record.file);
    records_damaged |= record.tokens.size() == 0;
  }
  uint64_t removed = 0;
  for (const fs::directory_entry& entry : entries) {
    const std::string name = entry.path().filename().string();
    const auto parsed = ParseSegmentsEntry(name);
    const bool unfinished = name.ends_with(".tmp");
    if (parsed && parsed->blob.empty() && left_alone_.contains(parsed->id)) continue;
    if (!parsed && !unfinished) {
      LogWarning("left alone: " + entry.path().string() + " is not a file of the store");
      continue;
    }
    // It is unknown which file a damaged record named, so no rows are freed while there is one.
    const bool known =
        !unfinished && (parsed->blob.empty() ? records_damaged || known_files.contains(parsed->id)
                                             : tree.Record({parsed->id}).ok());
    if (!known) {
      PREFIXD_TRY(RemoveFile(entry.path()));
      ++removed;
    } else if (!parsed->blob.empty()) {
      blobs->Register({parsed->id}, tree.Record({parsed->id})->tenant, parsed->blob,
                      entry.file_size(error));
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
    Status checked = [&]() -> Status {
      PREFIXD_TRY(CheckRelations(record));
      PREFIXD_ASSIGN(
          const SegmentHeader header,
          SegmentFile::Check(*engine, SegmentPath(options.dir, record.file), record, direct));
      return CheckModel(record, header);
    }();
    if (checked.ok()) continue;
    if (checked.error().code == Code::kCorrupt) {
      Quarantine(record.id, checked.error().message);
    } else {
      // Reads will meet the same error, or not: the bytes themselves are not known to be bad.
      LogWarning("segment " + record.id.ToString() + ": " + checked.error().message);
    }
  }
}

Status StoreCore::VerifySegment(SegmentRecord record, const VerifyRun& run, VerifyReport& report) {
  ReadServices unheard = services;  // this function judges the findings
  unheard.on_corrupt = [](const SegmentId&, const std::string&) {};
  const std::string who = "segment " + record.id.ToString();
  Status sound;
  while (true) {
    sound = [&]() -> Status {
      PREFIXD_TRY(CheckRelations(record));
      // The file is opened afresh, because its copy in memory may be better than the disk's.
      PREFIXD_ASSIGN(const auto file,
                     SegmentFile::Open(*engine, SegmentPath(options.dir, record.file), record,
                                       direct, {}, run.memory));
      PREFIXD_TRY(CheckModel(record, file->header()));
      const uint64_t first = run.from.file == record.file ? run.from.next_page : 0;
      PREFIXD_TRY(VerifyAllPages(
          unheard, *file, [&](uint64_t n) { return run.page_done(record, n); }, first,
          run.window_pages));
      report.pages += file->layout().table_page;
      report.bytes += record.file_bytes;
      return {};
    }();
    if (sound.ok()) break;
    if (Unread(sound.error())) return sound;
    const auto now = tree.Record(record.id);
    if (!now.ok()) return {};  // removed meanwhile
    if (now->file == record.file) break;
    record = *now;  // rewritten meanwhile: its new file counts
  }
  report.covered.push_back(record.id);
  if (sound.ok()) {
    LiftQuarantine(record.id);
  } else {
    report.damaged.push_back(who + ": " + sound.error().message);
    if (sound.error().code == Code::kCorrupt) {
      files.Erase(record);
      Quarantine(record.id, sound.error().message);
    }
  }
  for (const std::string& name : blobs->List(record.id)) {
    ++report.blobs;
    const auto checked = blobs->Check(record.id, name, run.blobs);
    if (checked.ok()) {
      report.bytes += *checked;
      continue;
    }
    if (checked.error().code == Code::kNotFound) continue;  // removed or replaced meanwhile
    if (Unread(checked.error())) return checked.error();
    report.damaged.push_back(who + ", blob " + name + ": " + checked.error().message);
    if (checked.error().code == Code::kCorrupt) DropDamagedBlob(record.id, name);
  }
  return {};
}

void StoreCore::DropDamagedBlob(const SegmentId& id, std::string_view name) {
  const auto dropped = blobs->DropDamaged(id, name);
  if (!dropped.ok()) return LogWarning(dropped.error().message);
  if (!*dropped) return;
  LogWarning("blob " + std::string(name) + " of segment " + id.ToString() +
             " was damaged and is deleted");
  if (blob_lost) blob_lost(id, name);
}

Result<VerifyReport> StoreCore::Verify(const std::function<std::vector<SegmentRecord>()>& wanted,
                                       const Progress& progress, MemoryAccount memory) {
  VerifyReport report;
  VerifyRun run;
  run.memory = std::move(memory);
  uint64_t done = 0, total = 0;
  run.page_done = [&](const SegmentRecord&, uint64_t n) {
    done += n;
    return !progress || progress(std::min(done, total), total, "pages");
  };
  std::set<SegmentId> seen;
  for (bool again = true; again;) {
    std::vector<SegmentRecord> records = wanted();
    std::erase_if(records, [&](const SegmentRecord& r) { return !seen.insert(r.id).second; });
    for (const SegmentRecord& record : records) total += record.file_bytes / kPageBytes;
    again = false;
    for (const SegmentRecord& record : records) {
      const uint64_t before = done;
      const size_t covered = report.covered.size();
      PREFIXD_TRY(VerifySegment(record, run, report));
      again |= report.covered.size() == covered;
      done = before + record.file_bytes / kPageBytes;
      if (progress && !progress(done, total, "pages")) {
        return Error{Code::kCancelled, "verification was stopped"};
      }
    }
  }
  return report;
}

}  // namespace prefixd::storage
