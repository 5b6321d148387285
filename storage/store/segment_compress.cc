#include "storage/store/segment_compress.h"

#include <chrono>
#include <thread>
#include <utility>

#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/read/gather_plan.h"
#include "storage/segment/segment_file_writer.h"
#include "storage/store/new_file.h"

namespace prefixd::storage {
namespace {

// Reads rows of one run as they are stored, densely. own: own indices, ascending.
Status ReadKept(StoreCore& core, const SegmentFile& file, uint32_t layer, uint32_t head,
                std::span<const uint32_t> own, std::span<std::byte> out) {
  PREFIXD_ASSIGN(const RunOrder* order, file.Order(*core.engine, layer, head));
  const RunLayout& run = file.layout().of(layer);
  GatherPlan pieces(file.layout(), order, layer, head, RowPart::kRow);
  pieces.AddRows(own, 0,
                 {out.data(), run.row_bytes(), out.data() + run.key_bytes(), run.row_bytes()});
  ReadStats ignored;
  return ReadPieces(core.services, file, pieces.Take(), Access::kBackground, &ignored);
}

// Copies the rows that stay, run by run.
Status CopyKept(StoreCore& core, const SegmentFile& source, const CompressOptions& options,
                SegmentFileWriter& writer) {
  const SegmentLayout& l = writer.layout();
  const TokenRange tokens = source.header().tokens;
  const uint64_t total = uint64_t{l.runs()} * l.rows();
  std::vector<std::byte> rows;
  for (uint32_t run = 0; run < l.runs(); ++run) {
    const uint32_t layer = l.heads.layer_of(run), head = l.heads.head_of(run);
    PREFIXD_ASSIGN(std::vector<uint32_t> kept, options.kept(layer, head));
    bool fits = kept.size() == l.rows();
    for (uint32_t& t : kept) {
      fits = fits && tokens.contains(t);
      t -= tokens.begin;
    }
    for (size_t i = 1; i < kept.size(); ++i) fits = fits && kept[i - 1] < kept[i];
    if (!fits) {
      return InvalidArgument("each KV head keeps " + std::to_string(l.rows()) +
                             " tokens of the segment, ascending");
    }
    rows.resize(kept.size() * l.of(layer).row_bytes());
    PREFIXD_TRY(ReadKept(core, source, layer, head, kept, rows));
    PREFIXD_TRY(writer.WriteKept(layer, head, kept, rows));
    if (options.progress && !options.progress(uint64_t{run + 1} * l.rows(), total, "rows")) {
      return Error{Code::kCancelled, "the compressing was stopped"};
    }
  }
  return {};
}

// Matches, blobs and a warm-up pin a segment for a moment; what stays pinned is open.
void AwaitUnpinned(StoreCore& core, const SegmentId& segment) {
  core.tree.Claim(segment, [&] {
    for (int ms = 0; ms < 1000 && core.tree.Pinned(segment); ++ms) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
}

}  // namespace

Status CheckCompressible(StoreCore& core, const SegmentId& id) {
  const SegmentId segment = core.tree.Resolve(id).first;
  AwaitUnpinned(core, segment);
  return core.tree.CheckCompressible(segment);
}

Status CompressSegment(StoreCore& core, const SegmentId& id, const CompressOptions& options) {
  const SegmentId segment = core.tree.Resolve(id).first;
  PREFIXD_TRY(CheckCompressible(core, segment));
  PREFIXD_ASSIGN(const SegmentRecord old, core.tree.Record(segment));
  if (!options.kept || options.kept_rows == 0 || options.kept_rows >= old.tokens.size()) {
    return InvalidArgument("a compressed segment keeps some of its " +
                           std::to_string(old.tokens.size()) + " tokens, not all");
  }
  SegmentRecord sealed = old;
  NewFile file;
  {
    // Held while rows are read, and not at the swap, which wants nobody to hold it.
    PREFIXD_ASSIGN(const ChainPin pin, core.tree.PinSegment(segment));
    PREFIXD_ASSIGN(const auto source, core.segments->Open(segment));
    PREFIXD_ASSIGN(const SegmentManifest manifest, ManifestOf(core, old));
    SegmentHeader header = source->header();
    RandomBytes(header.file);
    header.SetKept(options.kept_rows);
    PREFIXD_ASSIGN(sealed.full_bytes, header.FullBytes());
    PREFIXD_ASSIGN(file, CreateNewFile(core, old.tenant, header, EncodeManifest(manifest),
                                       {source->tokens().begin(), source->tokens().end()}));
    sealed.file = header.file;
    PREFIXD_TRY(CopyKept(core, *source, options, *file.writer));
  }
  SequenceTicket sequence = core.catalog->sequences().Next();
  sealed.sequence = sequence.number();
  PREFIXD_TRY(SealNewFile(core, *file.writer, sealed));
  CrashPoint("compress.sealed");
  AwaitUnpinned(core, segment);
  {
    std::lock_guard commit(core.commit_mutex);
    // Users may have changed the name meanwhile; their changes stay.
    auto now = core.tree.Record(segment);
    if (!now.ok()) {
      file.writer->Discard();
      return std::move(now).error();
    }
    now->file = sealed.file;
    now->sequence = sealed.sequence;
    now->file_bytes = file.writer->layout().file_bytes();
    now->reclustered = false;
    now->kept_rows = options.kept_rows;
    now->full_bytes = sealed.full_bytes;
    CatalogChange change;
    change.put.push_back({*now, std::nullopt});
    CrashPoint("compress.before_commit");
    PREFIXD_TRY(SwapIn(core, file, sequence, change, [&](const auto& commit_change) {
      return core.tree.Compress(*now, old.file, commit_change);
    }));
  }
  CrashPoint("compress.committed");
  PREFIXD_TRY(core.removal->FreeFile(old));
  return SyncDirectory(core.options.dir / "segments");
}

Result<SegmentSizes> CompressedSizes(const StoreCore& core, const SegmentId& id,
                                     uint32_t kept_rows) {
  const SegmentId segment = core.tree.Resolve(id).first;
  PREFIXD_ASSIGN(const auto file, core.segments->Open(segment, Need::kIds));
  SegmentHeader header = file->header();
  header.SetKept(kept_rows);
  PREFIXD_ASSIGN(const SegmentLayout layout, header.Layout());
  return SegmentSizes{file->record().file_bytes, layout.file_bytes()};
}

}  // namespace prefixd::storage
