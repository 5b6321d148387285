#include "storage/core/segment_access.h"

#include <utility>

#include "storage/catalog/store_dir.h"
#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/segment/unix_time.h"

namespace prefixd::storage {
namespace {

constexpr int64_t kTouchStepMs = 60'000;

struct PlacedFile {
  OpenFiles::Place place;  // given back when the file is closed
  std::shared_ptr<const SegmentFile> file;
};

}  // namespace

Result<OpenFiles::Place> SegmentAccess::PlaceFor(const std::string& tenant) {
  while (true) {
    if (auto place = parts_.open_files.Take(tenant)) return *std::move(place);
    if (parts_.files.CloseOne(&tenant) || parts_.files.CloseOne(nullptr)) continue;
    return Error{Code::kResourceExhausted,
                 "no more segments can be opened for tenant '" + tenant + "': there may be " +
                     std::to_string(parts_.open_files.most()) +
                     " open files of them, of which it has its part (ulimit -n, LimitNOFILE); "
                     "detach sessions, or try again later",
                 500};
  }
}

Result<std::shared_ptr<const SegmentFile>> SegmentAccess::Open(const SegmentId& id, Need need) {
  while (true) {
    PREFIXD_ASSIGN(const SegmentRecord record, parts_.tree.Record(id));
    const auto opened = [&]() -> Result<std::shared_ptr<const SegmentFile>> {
      auto file = parts_.files.Find(record);
      if (!file) {
        PREFIXD_ASSIGN(OpenFiles::Place place, PlaceFor(record.tenant));
        const auto open = need == Need::kRows ? &SegmentFile::Open : &SegmentFile::OpenIds;
        PREFIXD_ASSIGN(file,
                       open(*parts_.services.engine, SegmentPath(parts_.options.dir, record.file),
                            record, parts_.direct, parts_.services.read_deadline,
                            parts_.options.MemoryOf(record.tenant), parts_.keys));
        PREFIXD_TRY(parts_.models.Check(record, file->header()));
        // Whoever holds the file holds its place.
        const auto placed = std::make_shared<PlacedFile>(std::move(place), std::move(file));
        file = {placed, placed->file.get()};
        parts_.files.Add(file);
      }
      if (need == Need::kRows) PREFIXD_TRY(file->LoadTable(*parts_.services.engine));
      return file;
    }();
    if (opened.ok()) return opened;
    if (Condemn(record, opened.error())) return opened.error();
  }
}

bool SegmentAccess::Condemn(const SegmentRecord& record, const Error& why) {
  // A rewrite between the look at the tree and the opening removes the old file rightly.
  const auto now = parts_.tree.Record(record.id);
  if (!now.ok() || now->file != record.file) return false;
  if (why.code == Code::kCorrupt) {
    parts_.counters.checksum_failures.fetch_add(1, std::memory_order_relaxed);
    parts_.files.Erase(record);
    Quarantine(record.id, why.message);
  }
  return true;
}

Status SegmentAccess::CheckEnds(const SegmentId& id) {
  while (true) {  // nothing is pinned: it may be removed or rewritten meanwhile
    PREFIXD_ASSIGN(const SegmentRecord record, parts_.tree.Record(id));
    const Status sound = [&]() -> Status {
      PREFIXD_ASSIGN(
          const SegmentHeader header,
          SegmentFile::Check(*parts_.services.engine, SegmentPath(parts_.options.dir, record.file),
                             record, parts_.direct, parts_.keys, IoPriority::kScrub));
      return parts_.models.Check(record, header);
    }();
    if (sound.ok()) return {};
    if (!Condemn(record, sound.error())) continue;
    return sound.error().code == Code::kCorrupt ? Status() : sound;
  }
}

void SegmentAccess::Quarantine(const SegmentId& id, const std::string& reason) {
  if (!parts_.tree.SetQuarantine(id, reason)) return;
  LogWarning("segment " + id.ToString() + " is quarantined: " + reason);
  CrashPoint("quarantine.begin");
  if (Status saved = parts_.catalog.SetQuarantine(id, reason); !saved.ok()) {
    LogWarning("the quarantine lasts until the store is closed: " + saved.error().message);
  }
}

void SegmentAccess::LiftQuarantine(const SegmentId& id) {
  if (!parts_.tree.SetQuarantine(id, "")) return;
  LogInfo("segment " + id.ToString() + " verifies again; its quarantine is lifted");
  CrashPoint("quarantine.before_lift");
  if (Status saved = parts_.catalog.SetQuarantine(id, ""); !saved.ok()) {
    LogWarning(saved.error().message);
  }
}

void SegmentAccess::Touch(const SegmentId& id) {
  const int64_t now = parts_.options.Now();
  for (const PrefixTree::Use& use : parts_.tree.Touch(id, now, kTouchStepMs)) {
    Status saved = parts_.catalog.SetLastUsed(use.id, now, use.heat);
    if (!saved.ok()) return LogWarning(saved.error().message);
  }
}

Result<PrefixInfo> SegmentAccess::Info(const SegmentId& id) const {
  PREFIXD_ASSIGN(PrefixInfo info, parts_.tree.Info(id));
  info.own_bytes += parts_.blobs.BytesOf(id);
  info.listed = info.listed && !Expired(info.expires_unix_ms, NowUnixMs());
  return info;
}

Status SegmentAccess::CheckRelations(const SegmentRecord& record) const {
  const auto wrong = [](std::string what) { return Error{Code::kCorrupt, std::move(what)}; };
  if (record.tokens.size() == 0) return wrong("its catalog record is damaged");
  if (!parts_.models.Knows(record.model)) {
    return wrong("the catalog does not know its model '" + record.model + "'");
  }
  if (record.is_root()) return {};
  const auto parent = parts_.tree.Record(record.parent);
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
  if (parent->compressed()) {
    return wrong("the segment it continues, " + record.parent.ToString() +
                 ", is compressed: some of the rows it needs are gone");
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

}  // namespace prefixd::storage
