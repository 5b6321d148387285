#include "storage/core/verifier.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/call_scope.h"
#include "storage/catalog/store_dir.h"
#include "storage/io/errors.h"

namespace prefixd::storage {
namespace {

// Whether a verification ended for a reason that has nothing to do with what is stored.
bool Interrupted(const Error& error) {
  return EndedEarly(error) || error.code == Code::kResourceExhausted;
}

}  // namespace

Status Verifier::VerifySegment(SegmentRecord record, const VerifyRun& run, VerifyReport& report) {
  ReadServices unheard = parts_.services;  // this function judges the findings
  unheard.on_corrupt = [](const SegmentId&, const std::string&) {};
  const std::string who = "segment " + record.id.ToString();
  Status sound;
  while (true) {
    sound = [&]() -> Status {
      PREFIXD_TRY(parts_.segments.CheckRelations(record));
      // The file is opened afresh, because its copy in memory may be better than the disk's.
      PREFIXD_ASSIGN(
          const auto file,
          SegmentFile::Open(*parts_.services.engine, SegmentPath(parts_.options.dir, record.file),
                            record, parts_.direct, {}, run.memory, parts_.keys));
      PREFIXD_TRY(parts_.models.Check(record, file->header()));
      const uint64_t first = run.from.file == record.file ? run.from.next_page : 0;
      PREFIXD_TRY(VerifyAllPages(
          unheard, *file, [&](uint64_t n) { return run.page_done(record, n); }, first,
          run.window_pages));
      report.pages += file->layout().table_page;
      report.bytes += record.file_bytes;
      return {};
    }();
    if (sound.ok()) break;
    if (Interrupted(sound.error())) return sound;
    const auto now = parts_.tree.Record(record.id);
    if (!now.ok()) return {};  // removed meanwhile
    if (now->file == record.file) break;
    record = *now;  // rewritten meanwhile: its new file counts
  }
  // An error of the disk says nothing about the bytes behind it: they may be read another time.
  const bool unread = !sound.ok() && sound.error().code != Code::kCorrupt;
  if (unread) {
    report.unread.push_back(who + ": " + sound.error().message);
  } else {
    report.covered.push_back(record.id);
  }
  if (sound.ok()) {
    parts_.segments.LiftQuarantine(record.id);
  } else if (!unread) {
    report.damaged.push_back(who + ": " + sound.error().message);
    parts_.files.Erase(record);
    parts_.segments.Quarantine(record.id, sound.error().message);
  }
  for (const std::string& name : parts_.blobs.List(record.id)) {
    ++report.blobs;
    const auto checked = parts_.blobs.Check(record.id, name, run.blobs);
    if (checked.ok()) {
      report.bytes += *checked;
      continue;
    }
    if (checked.error().code == Code::kNotFound) continue;  // removed or replaced meanwhile
    if (Interrupted(checked.error())) return checked.error();
    const bool damaged = checked.error().code == Code::kCorrupt;
    (damaged ? report.damaged : report.unread)
        .push_back(who + ", blob " + name + ": " + checked.error().message);
    if (damaged) DropDamagedBlob(record.id, name);
  }
  return {};
}

void Verifier::DropDamagedBlob(const SegmentId& id, std::string_view name) {
  const auto dropped = parts_.blobs.DropDamaged(id, name);
  if (!dropped.ok()) return LogWarning(dropped.error().message);
  if (!*dropped) return;
  LogWarning("blob " + std::string(name) + " of segment " + id.ToString() +
             " was damaged and is deleted");
  if (blob_lost_) blob_lost_(id, name);
}

Result<VerifyReport> Verifier::Verify(const std::function<std::vector<SegmentRecord>()>& wanted,
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
