#include "storage/core/segment_removal.h"

#include "storage/catalog/store_dir.h"
#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/io/file.h"
#include "storage/segment/unix_time.h"

namespace prefixd::storage {

Status SegmentRemoval::Erase(const SegmentId& id, const RemovalCause& cause) {
  CatalogChange change;
  change.remove.push_back(id);
  PREFIXD_ASSIGN(const SegmentRecord known, parts_.tree.Record(id));
  if (!known.live) {  // which nobody asks for
    change.gone.push_back(
        {cause.reason, known.tenant, id, known.tokens, NowUnixMs(), cause.why, {}});
  }
  for (const AliasRecord& alias : parts_.tree.AliasesInto(id))
    change.remove_aliases.push_back(alias.id);
  CrashPoint("remove.before_commit");
  PREFIXD_ASSIGN(const SegmentRecord record,
                 parts_.tree.Erase(id, [&] { return parts_.catalog.Apply(change); }));
  CrashPoint("remove.committed");
  return Free(record);
}

Status SegmentRemoval::Free(const SegmentRecord& record) {
  // The segment is gone for good; the rest only frees space, and recovery would do it too.
  PREFIXD_TRY(FreeFile(record));
  CrashPoint("remove.before_blobs");
  PREFIXD_TRY(parts_.blobs.RemoveAll(record.id));
  CrashPoint("remove.before_directory_sync");
  return SyncDirectory(parts_.options.dir / "segments");
}

Status SegmentRemoval::FreeFile(const SegmentRecord& old) {
  parts_.files.Erase(old);
  parts_.tier.EraseSegment(old.tenant, old.sequence, old.file_bytes / kPageBytes);
  return RemoveFile(SegmentPath(parts_.options.dir, old.file));
}

// Each round removes a segment, which may make the one that it continued unneeded too.
void SegmentRemoval::FreeUnneeded(const RemovalCause& cause) {
  while (true) {
    bool freed = false;
    for (const SegmentId& id : parts_.tree.Unneeded()) {
      std::lock_guard commit(parts_.commit_mutex);
      const auto record = parts_.tree.Record(id);
      if (!record.ok() || record->listed) continue;  // removed, or needed again
      const Status done = Erase(id, cause);
      if (parts_.tree.Record(id).ok()) continue;  // pinned, or the catalog refused
      freed = true;
      if (!done.ok()) LogWarning(done.error().message);
    }
    if (!freed) return;
  }
}

}  // namespace prefixd::storage
