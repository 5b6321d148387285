#include "storage/store/store_recovery.h"

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/io/file.h"
#include "storage/io/together.h"
#include "storage/segment/unix_time.h"

namespace prefixd::storage {
namespace fs = std::filesystem;
namespace {

class Recovery {
 public:
  explicit Recovery(StoreCore& core) : core_(core) {}

  Status Run() {
    if (Status loaded = LoadSegments(); !loaded.ok()) {
      return WithHowToRecover(loaded.error(), core_.options.dir);
    }
    PREFIXD_ASSIGN(left_alone_, AdoptLostCommits(core_, log_));
    PREFIXD_TRY(SweepSegmentFiles());
    CrashPoint("recover.swept");
    CheckRecords();
    RemoveLive();
    core_.counters.unchecked_segments = core_.tree.size();
    core_.removal->FreeUnneeded({GoneReason::kRemoved, ""});
    return {};
  }

 private:
  struct KnownBlob {
    SegmentId id;
    std::string name;
    fs::path path;
    uint64_t bytes = 0;
  };

  Status LoadSegments() {
    PREFIXD_ASSIGN(std::vector<ModelRecord> models, core_.catalog->LoadModels());
    core_.models->Load(std::move(models));
    PREFIXD_ASSIGN(std::vector<CatalogSegment> segments, core_.catalog->LoadSegments());
    // A child begins behind its parent's beginning, so this sorts parents first; sequence numbers
    // would not, because they change when files are rewritten.
    std::sort(segments.begin(), segments.end(), [](const auto& a, const auto& b) {
      return a.record.tokens.begin < b.record.tokens.begin;
    });
    const int64_t now = NowUnixMs();
    uint64_t loaded = 0;
    for (CatalogSegment& segment : segments) {
      log_.Note(loaded++, segments.size(), "records loaded");
      if (segment.verified_unix_ms > now + kClockSlackMs) segment.verified_unix_ms = kUnknownTimeMs;
      int64_t& used = segment.last_used_unix_ms;
      if (used > now + kClockSlackMs) used = std::min(segment.record.created_unix_ms, now);
      core_.tree.Insert({segment, core_.models->ScopeOf(segment.record),
                         core_.segments->CheckRelations(segment.record).ok()});
      core_.catalog->sequences().Saw(segment.record.sequence);
    }
    PREFIXD_ASSIGN(const std::vector<AliasRecord> aliases, core_.catalog->LoadAliases());
    for (const AliasRecord& alias : aliases) core_.tree.InsertAlias(alias);
    const auto& memory = core_.options.memory;
    if (memory && memory->used() > memory->capacity()) {
      LogWarning("the records of " + std::to_string(segments.size()) +
                 " stored segments take more memory than there is (store.memory_mib): calls are "
                 "refused until prefixes are removed or there is more");
    }
    return {};
  }

  // Files that the catalog does not know are puts that never committed, or interrupted removals.
  Status SweepSegmentFiles() {
    const fs::path dir = core_.options.dir / "segments";
    PREFIXD_ASSIGN(const auto entries, ListDirectory(dir));
    std::set<Uuid> known_files;
    std::unordered_map<SegmentId, std::string, SegmentIdHash> tenants;
    bool records_damaged = false;
    for (const SegmentRecord& record : core_.tree.Records()) {
      known_files.insert(record.file);
      tenants.emplace(record.id, record.tenant);
      records_damaged |= record.tokens.size() == 0;
    }
    uint64_t removed = 0;
    std::vector<KnownBlob> blobs;
    for (const fs::directory_entry& entry : entries) {
      const std::string name = entry.path().filename().string();
      const auto parsed = ParseSegmentsEntry(name);
      const bool unfinished = name.ends_with(".tmp");
      if (parsed && parsed->blob.empty()) present_.insert(parsed->id);
      if (parsed && parsed->blob.empty() && left_alone_.contains(parsed->id)) continue;
      if (!parsed && !unfinished) {
        LogWarning("left alone: " + entry.path().string() + " is not a file of the store");
        continue;
      }
      // It is unknown which file a damaged record named, so no rows are freed while there is one.
      const bool known =
          !unfinished && (parsed->blob.empty() ? records_damaged || known_files.contains(parsed->id)
                                               : tenants.contains({parsed->id}));
      if (!known) {
        log_.Note(removed, entries.size(), "files freed");
        PREFIXD_TRY(RemoveFile(entry.path()));
        ++removed;
      } else if (!parsed->blob.empty()) {
        blobs.push_back({{parsed->id}, parsed->blob, entry.path(), 0});
      }
    }
    // Nothing of a directory's files may be in memory: many are looked up at a time.
    std::atomic<uint64_t> measured = 0;
    PREFIXD_TRY(Together(blobs.size(), kReadsAtOnce, [&](size_t i) -> Status {
      log_.Note(measured++, blobs.size(), "blobs measured");
      std::error_code error;
      const uint64_t bytes = fs::file_size(blobs[i].path, error);
      if (!error) blobs[i].bytes = bytes;
      // Whoever reads it meets the error; it is made again, or goes with its segment.
      if (error) {
        LogWarning("the size of " + blobs[i].path.string() + " cannot be read (" + error.message() +
                   "): it counts nothing in its tenant's space");
      }
      return {};
    }));
    for (const KnownBlob& blob : blobs) {
      core_.blobs->Register(blob.id, tenants.at(blob.id), blob.name, blob.bytes);
    }
    if (removed == 0) return {};
    core_.counters.recovered_orphans = removed;
    CrashPoint("recover.before_directory_sync");
    LogInfo("recovery freed " + std::to_string(removed) + " unfinished or orphaned files");
    return SyncDirectory(dir);
  }

  // Own tokens that sessions of an earlier process moved are nobody's any more.
  void RemoveLive() {
    uint64_t removed = 0;
    const std::vector<SegmentRecord> records = core_.tree.Records();
    for (const SegmentRecord& record : records) {
      if (!record.live) continue;
      log_.Note(removed++, records.size(), "segments of own tokens removed");
      if (!record.listed) continue;  // goes with the one that continues it
      if (const Status gone = core_.names->Remove(record.id); !gone.ok()) {
        LogWarning("own tokens of a session that is gone: " + gone.error().message);
      }
    }
    if (removed == 0) return;
    core_.counters.recovered_orphans += removed;
    LogInfo("recovery removed " + std::to_string(removed) +
            " segments of own tokens whose sessions are gone");
  }

  // Files are not opened, which would take as long as there are many: whoever uses one checks it
  // first, and CheckEnds reads those that nobody uses.
  void CheckRecords() {
    for (const SegmentRecord& record : core_.tree.Records()) {
      Status sound = core_.segments->CheckRelations(record);
      if (sound.ok() && !present_.contains(record.file)) {
        sound = Error{Code::kCorrupt, "segment " +
                                          SegmentPath(core_.options.dir, record.file).string() +
                                          ": the file is missing"};
      }
      if (!sound.ok()) core_.segments->Quarantine(record.id, sound.error().message);
    }
  }

  StoreCore& core_;
  OpeningLog log_;
  std::set<Uuid> left_alone_;  // files that are neither known nor may be freed
  std::set<Uuid> present_;     // files of rows
};

}  // namespace

Status RecoverStore(StoreCore& core) { return Recovery(core).Run(); }

Status CheckEnds(StoreCore& core, const std::function<bool()>& go_on) {
  const std::vector<SegmentRecord> records = core.tree.Records();
  core.counters.unchecked_segments = records.size();
  for (const SegmentRecord& record : records) {
    if (!go_on()) return Error{Code::kCancelled, "the check of segments was stopped"};
    const Status checked = core.segments->CheckEnds(record.id);
    --core.counters.unchecked_segments;
    if (checked.ok() || checked.error().code == Code::kNotFound) continue;
    // Reads will meet the same error, or not: the bytes themselves are not known to be bad.
    LogWarning("segment " + record.id.ToString() + ": " + checked.error().message);
  }
  return {};
}

}  // namespace prefixd::storage
