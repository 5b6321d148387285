#include "storage/store/segment_reencrypt.h"

#include <algorithm>
#include <utility>

#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/read/page_reader.h"
#include "storage/segment/segment_file_writer.h"
#include "storage/store/new_file.h"

namespace prefixd::storage {
namespace {

// Reads pages of one file, verified, and writes them to the other.
class PageCopy {
 public:
  PageCopy(StoreCore& core, const SegmentFile& from, SegmentFileWriter& to,
           const Progress& progress)
      : core_(core), from_(from), to_(to), progress_(progress) {
    const SegmentLayout& l = from.layout();
    total_ = l.token_page - 1 + l.table_page - l.order_page;
  }

  // Copies pages [first, end) of `from` to the place `to_first`.
  Status Copy(uint64_t first, uint64_t end, uint64_t to_first) {
    std::vector<PagePiece> pieces;
    for (uint64_t page = first; page < end; page += pieces.size()) {
      const uint64_t n = std::min<uint64_t>(kWindowPages, end - page);
      pages_.resize(n * kPageBytes);
      pieces.clear();
      for (uint64_t i = 0; i < n; ++i) {
        pieces.push_back({page + i, 0, kPageBytes, pages_.data() + i * kPageBytes});
      }
      ReadStats ignored;
      PREFIXD_TRY(ReadPieces(core_.services, from_, pieces, Access::kBackground, &ignored));
      PREFIXD_TRY(to_.CopyPages(to_first + (page - first), pages_));
      done_ += n;
      if (progress_ && !progress_(done_, total_, "pages")) {
        return Error{Code::kCancelled, "the encrypting was stopped"};
      }
    }
    return {};
  }

 private:
  StoreCore& core_;
  const SegmentFile& from_;
  SegmentFileWriter& to_;
  const Progress& progress_;
  std::vector<std::byte> pages_;
  uint64_t done_ = 0, total_ = 0;
};

// Returns whether a blob was written anew.
Result<bool> ReencryptBlobs(StoreCore& core, const SegmentRecord& record) {
  bool any = false;
  for (const std::string& name : core.blobs->List(record.id)) {
    PREFIXD_ASSIGN(const bool written, core.blobs->Reencrypt(record.id, record.tenant, name));
    any |= written;
  }
  return any;
}

Status ReencryptFile(StoreCore& core, const SegmentFile& source, const SegmentRecord& old,
                     const Progress& progress) {
  PREFIXD_ASSIGN(const SegmentManifest manifest, ManifestOf(core, old));
  SegmentHeader header = source.header();
  RandomBytes(header.file);  // another file, and therefore another key
  PREFIXD_ASSIGN(NewFile file, CreateNewFile(core, old.tenant, header, EncodeManifest(manifest),
                                             {source.tokens().begin(), source.tokens().end()}));
  PageCopy copy(core, source, *file.writer, progress);
  const SegmentLayout &from = source.layout(), &to = file.writer->layout();
  PREFIXD_TRY(copy.Copy(1, from.token_page, 1));
  PREFIXD_TRY(copy.Copy(from.order_page, from.table_page, to.order_page));
  SequenceTicket sequence = core.catalog->sequences().Next();
  SegmentRecord sealed = old;
  sealed.sequence = sequence.number();
  PREFIXD_TRY(SealNewFile(core, *file.writer, sealed));
  std::lock_guard commit(core.commit_mutex);
  // Users may have changed the name meanwhile; their changes stay.
  PREFIXD_ASSIGN(SegmentRecord now, core.tree.Record(old.id));
  now.file = header.file;
  now.sequence = sequence.number();
  now.file_bytes = to.file_bytes();
  CatalogChange change;
  change.put.push_back({now, std::nullopt});
  CrashPoint("reencrypt.before_commit");
  return SwapIn(core, file, sequence, change, [&](const auto& commit_change) {
    return core.tree.Update(now, old.file, commit_change);
  });
}

}  // namespace

Result<bool> ReencryptSegment(StoreCore& core, const SegmentId& id, const Progress& progress) {
  if (!core.keys) {
    return Error{Code::kFailedPrecondition,
                 "the store has no key to encrypt with (store.encryption_key_file)"};
  }
  const SegmentId segment = core.tree.Resolve(id).first;
  PREFIXD_ASSIGN(const ChainPin pin, core.tree.PinSegment(segment));
  PREFIXD_ASSIGN(const SegmentRecord old, core.tree.Record(segment));
  if (old.live) return false;  // it goes with its session
  PREFIXD_ASSIGN(const bool blobs, ReencryptBlobs(core, old));
  PREFIXD_ASSIGN(const auto source, core.segments->Open(segment));
  if (source->header().key == core.keys->newest().id()) return blobs;
  PREFIXD_TRY(ReencryptFile(core, *source, old, progress));
  CrashPoint("reencrypt.committed");
  PREFIXD_TRY(core.removal->FreeFile(old));
  PREFIXD_TRY(SyncDirectory(core.options.dir / "segments"));
  return true;
}

}  // namespace prefixd::storage
