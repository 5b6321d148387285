#include "storage/store/segment_rewrite.h"

#include <algorithm>
#include <utility>

#include "storage/catalog/segment_inspect.h"
#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/read/gather_plan.h"
#include "storage/segment/row_encoding.h"
#include "storage/segment/segment_file_writer.h"
#include "storage/store/new_file.h"
#include "storage/store/open_prefix.h"

namespace prefixd::storage {
namespace {

// Rows are copied in runs of about this many bytes.
constexpr size_t kCopyBytes = 4u << 20;

// Reads rows [begin, end) by own index, densely: as stored, or decoded.
Status ReadRun(StoreCore& core, const SegmentFile& file, uint32_t layer, uint32_t head,
               uint32_t begin, uint32_t end, std::span<std::byte> out,
               Deliver deliver = Deliver::kAsStored) {
  PREFIXD_ASSIGN(const RunOrder* order, file.Order(*core.engine, layer, head));
  const bool decoded = deliver == Deliver::kDecoded;
  const RowShape given = file.header().row(layer);
  const RunLayout& stored = file.layout().of(layer);
  const size_t key = decoded ? given.key_bytes() : stored.key_bytes();
  const size_t row = decoded ? given.bytes() : stored.row_bytes();
  GatherPlan pieces(file.layout(), order, layer, head, RowPart::kRow,
                    decoded ? file.header().encoding : RowEncoding::kAsGiven);
  pieces.AddRun(begin, end, {out.data(), row, out.data() + key, row});
  ReadStats ignored;
  return ReadPieces(core.services, file, pieces.Take(), Access::kBackground, &ignored, deliver);
}

class ProgressCounter {
 public:
  ProgressCounter(const Progress& report, uint64_t total) : report_(report), total_(total) {}
  Status Add(uint64_t rows) {
    done_ += rows;
    if (!report_ || report_(done_, total_, "rows")) return {};
    return Error{Code::kCancelled, "the rewriting was stopped"};
  }

 private:
  const Progress& report_;
  const uint64_t total_;
  uint64_t done_ = 0;
};

Status WriteReclustered(StoreCore& core, const SegmentFile& source, const ReclusterOptions& options,
                        SegmentFileWriter& writer) {
  const SegmentLayout& l = writer.layout();
  ProgressCounter progress(options.progress, uint64_t{l.runs()} * l.shape.n_tokens);
  const bool encoded = source.header().encoding != RowEncoding::kAsGiven;
  std::vector<std::byte> rows, given;
  for (uint32_t run = 0; run < l.runs(); ++run) {
    const uint32_t layer = l.heads.layer_of(run), head = l.heads.head_of(run);
    const size_t given_row = source.header().row(layer).bytes();
    for (uint32_t chunk = 0; chunk < l.chunks(); ++chunk) {
      const uint32_t begin = l.chunk_begin(chunk), n = l.chunk_size(chunk);
      rows.resize(size_t{n} * l.of(layer).row_bytes());
      PREFIXD_TRY(ReadRun(core, source, layer, head, begin, begin + n, rows));
      if (encoded) {  // encoded rows move as stored; their decoded form decides the order
        given.resize(size_t{n} * given_row);
        PREFIXD_TRY(ReadRun(core, source, layer, head, begin, begin + n, given, Deliver::kDecoded));
      }
      PREFIXD_ASSIGN(
          const std::vector<uint32_t> order,
          options.order(layer, head, source.header().tokens.begin + begin, encoded ? given : rows));
      PREFIXD_TRY(writer.WriteChunk(layer, head, chunk, rows, order));
      PREFIXD_TRY(progress.Add(n));
    }
  }
  return {};
}

// Copies all rows of `source` to the same layers and tokens of the new file.
Status CopyRows(StoreCore& core, const SegmentFile& source, SegmentFileWriter& writer) {
  const SegmentLayout& l = source.layout();
  const HeadRange all{0, l.shape.n_kv_heads};
  std::vector<std::byte> rows;
  for (uint32_t layer = 0; layer < l.shape.n_layers; ++layer) {
    const uint32_t heads = l.heads.heads_in(layer);
    if (heads == 0) continue;
    const size_t row = l.of(layer).row_bytes();
    const auto step = static_cast<uint32_t>(std::max<size_t>(1, kCopyBytes / (heads * row)));
    for (uint32_t begin = 0; begin < l.shape.n_tokens; begin += step) {
      const uint32_t n = std::min(step, l.shape.n_tokens - begin);
      const size_t head_bytes = n * row;
      rows.resize(heads * head_bytes);
      for (uint32_t head = 0; head < heads; ++head) {
        PREFIXD_TRY(ReadRun(core, source, layer, head, begin, begin + n,
                            std::span(rows).subspan(head * head_bytes, head_bytes)));
      }
      PREFIXD_TRY(writer.WriteRows(layer, all, source.header().tokens.begin + begin, n, rows));
    }
  }
  return {};
}

// A Pair is a segment and the one it is joined with.
struct Pair {
  SegmentRecord first, last;
};

Result<Pair> PairOf(const StoreCore& core, const SegmentId& leaf, uint32_t max_tokens) {
  Pair pair;
  PREFIXD_ASSIGN(pair.last, core.tree.Record(core.tree.Resolve(leaf).first));
  PREFIXD_ASSIGN(pair.first, core.tree.CompactParent(pair.last.id));
  const uint32_t n = pair.last.tokens.end - pair.first.tokens.begin;
  if (n > max_tokens) {
    return Error{Code::kFailedPrecondition, "together the segments have " + std::to_string(n) +
                                                " tokens, more than " + std::to_string(max_tokens)};
  }
  if (pair.first.encoding != pair.last.encoding) {
    return Error{Code::kFailedPrecondition, "the segments are encoded differently"};
  }
  if (pair.first.compressed() || pair.last.compressed()) {
    return Error{Code::kFailedPrecondition, "one segment is compressed"};
  }
  if (pair.first.live || pair.last.live) {
    return Error{Code::kFailedPrecondition, "they are own tokens of a session"};
  }
  if (pair.first.lineage != pair.last.lineage) {
    return Error{Code::kFailedPrecondition, "one segment's rows are exact, the other's derived"};
  }
  return pair;
}

// StagedBlobs are the blobs of a segment that is not committed yet; the destructor removes them
// unless it is. After a crash recovery finds them beside no segment and removes them.
class StagedBlobs {
 public:
  StagedBlobs(StoreCore& core, const SegmentRecord& segment)
      : core_(core), id_(segment.id), tenant_(segment.tenant) {}
  ~StagedBlobs() {
    if (kept_ || !any_) return;
    if (Status removed = core_.blobs->RemoveAll(id_); !removed.ok()) {
      LogWarning(removed.error().message + " (it will be freed when the store is opened next)");
    }
  }
  StagedBlobs(const StagedBlobs&) = delete;
  StagedBlobs& operator=(const StagedBlobs&) = delete;

  Status Put(const NewBlob& blob) {
    const uint64_t bytes = core_.blobs->BytesFor(blob.name, blob.producer, blob.bytes.size());
    PREFIXD_ASSIGN(const SpaceReservation space,
                   core_.room->Reserve(tenant_, bytes, Room::kAsItIs));
    any_ = true;
    CrashPoint("compact.before_blob");
    return core_.blobs->Put(id_, tenant_, blob.name, blob.producer, blob.bytes);
  }
  void Keep() { kept_ = true; }

 private:
  StoreCore& core_;
  const SegmentId id_;
  const std::string tenant_;
  bool any_ = false, kept_ = false;
};

}  // namespace

Status ReclusterSegment(StoreCore& core, const SegmentId& id, const ReclusterOptions& options) {
  if (options.chunk_tokens == 0 || options.chunk_tokens > kMaxChunkTokens || !options.order) {
    return InvalidArgument("reclustering needs an order and chunks of 1..65536 tokens");
  }
  const SegmentId segment = core.tree.Resolve(id).first;
  PREFIXD_ASSIGN(const ChainPin pin, core.tree.PinSegment(segment));
  PREFIXD_ASSIGN(const SegmentRecord old, core.tree.Record(segment));
  if (old.reclustered) return {};
  if (old.compressed()) return Compressed(segment);
  PREFIXD_ASSIGN(const auto source, core.segments->Open(segment));
  PREFIXD_ASSIGN(const SegmentManifest manifest, ManifestOf(core, old));

  SegmentHeader header = source->header();
  RandomBytes(header.file);
  header.chunk_tokens = options.chunk_tokens;
  PREFIXD_ASSIGN(NewFile file, CreateNewFile(core, old.tenant, header, EncodeManifest(manifest),
                                             {source->tokens().begin(), source->tokens().end()}));
  PREFIXD_TRY(WriteReclustered(core, *source, options, *file.writer));
  SequenceTicket sequence = core.catalog->sequences().Next();
  SegmentRecord sealed = old;
  sealed.sequence = sequence.number();
  PREFIXD_TRY(SealNewFile(core, *file.writer, sealed));
  {
    std::lock_guard commit(core.commit_mutex);
    // Users may have changed the name meanwhile (listed, pinned, when it expires); their changes
    // stay.
    PREFIXD_ASSIGN(SegmentRecord now, core.tree.Record(segment));
    now.file = header.file;
    now.sequence = sequence.number();
    now.file_bytes = file.writer->layout().file_bytes();
    now.reclustered = true;
    CatalogChange change;
    change.put.push_back({now, std::nullopt});
    CrashPoint("recluster.before_commit");
    PREFIXD_TRY(SwapIn(core, file, sequence, change, [&](const auto& commit_change) {
      return core.tree.Update(now, old.file, commit_change);
    }));
  }
  CrashPoint("recluster.committed");
  core.counters.reclustered++;
  PREFIXD_TRY(core.removal->FreeFile(old));
  return SyncDirectory(core.options.dir / "segments");
}

Result<PrefixInfo> CheckCompactionOf(const StoreCore& core, const SegmentId& leaf,
                                     uint32_t max_tokens) {
  PREFIXD_ASSIGN(const Pair pair, PairOf(core, leaf, max_tokens));
  PREFIXD_ASSIGN(PrefixInfo info, core.segments->Info(pair.last.id));
  RandomBytes(info.id.bytes);
  info.chain.pop_back();
  info.chain.back() = info.id;
  info.own_tokens = pair.last.tokens.end - pair.first.tokens.begin;
  info.reclustered = false;
  return info;
}

Result<SegmentId> CompactSegment(StoreCore& core, const SegmentId& leaf, uint32_t max_tokens,
                                 std::span<const NewBlob> blobs) {
  PREFIXD_ASSIGN(const Pair pair, PairOf(core, leaf, max_tokens));
  const auto& [first, last] = pair;
  SegmentRecord compacted = last;
  RandomBytes(compacted.id.bytes);
  compacted.file = compacted.id.bytes;
  compacted.parent = first.parent;
  compacted.tokens = {first.tokens.begin, last.tokens.end};
  compacted.first_token = first.first_token;
  compacted.lead = first.lead;
  compacted.reclustered = false;
  compacted.encoding_error = Combine(first.encoding_error, last.tokens.begin - first.tokens.begin,
                                     last.encoding_error, last.tokens.size());
  compacted.listed = false;  // the old names stand for it
  compacted.pinned = false;  // each name keeps its own
  compacted.expires_unix_ms = 0;
  const auto names = [&] {
    std::vector<AliasRecord> out;
    for (const SegmentRecord& record : {first, last}) {
      for (AliasRecord alias : core.tree.AliasesInto(record.id)) {
        alias.segment = compacted.id;
        out.push_back(std::move(alias));
      }
      if (!record.listed) continue;
      out.push_back({record.id, compacted.id, record.tokens.end, record.label,
                     record.created_unix_ms, record.pinned, record.expires_unix_ms});
    }
    return out;
  };
  CatalogChange change;
  change.remove = {last.id, first.id};
  change.put_aliases = names();

  NewFile file;
  {
    // Both stay pinned while their rows are read, and are unpinned before the swap.
    PREFIXD_ASSIGN(const auto prefix, OpenStoredPrefix(core.shared_from_this(), last.id, 0));
    PREFIXD_ASSIGN(const auto first_file, core.segments->Open(first.id));
    PREFIXD_ASSIGN(const auto last_file, core.segments->Open(last.id));
    const auto tokens = prefix->tokens();
    const auto& meta = core.catalog->meta();
    const auto hashes = core.HashesOf(prefix->model().fingerprint, last.tenant, tokens);
    change.put.push_back({compacted, OwnHashes(hashes, compacted.tokens.begin, meta.block_tokens)});

    SegmentHeader header = first_file->header();
    header.segment = compacted.id.bytes;
    header.file = compacted.file;
    header.tokens = compacted.tokens;
    header.chunk_tokens = 0;
    header.created_unix_ms = last.created_unix_ms;
    const SegmentManifest manifest{prefix->model(),   last.tenant,      last.label,
                                   meta.block_tokens, compacted.listed, change.put_aliases,
                                   change.remove};
    PREFIXD_ASSIGN(file, CreateNewFile(core, last.tenant, header, EncodeManifest(manifest),
                                       {tokens.begin() + compacted.tokens.begin, tokens.end()}));
    PREFIXD_TRY(CopyRows(core, *first_file, *file.writer));
    PREFIXD_TRY(CopyRows(core, *last_file, *file.writer));
  }
  SequenceTicket sequence = core.catalog->sequences().Next();
  compacted.sequence = sequence.number();
  compacted.file_bytes = file.writer->layout().file_bytes();
  change.put.front().record = compacted;
  PREFIXD_TRY(SealNewFile(core, *file.writer, compacted));
  CrashPoint("compact.sealed");
  StagedBlobs staged(core, compacted);
  for (const NewBlob& blob : blobs) {
    if (Status put = staged.Put(blob); !put.ok()) {
      file.writer->Discard();
      return put.error();
    }
  }
  {
    std::lock_guard commit(core.commit_mutex);
    // If either was reclustered, removed or continued in the meantime, the copied rows are still
    // right, but what the catalog says of the two may not be; a later compaction tries again.
    const auto first_now = core.tree.Record(first.id), last_now = core.tree.Record(last.id);
    const bool unchanged = first_now.ok() && last_now.ok() && *first_now == first &&
                           *last_now == last && names() == change.put_aliases;
    if (!unchanged) {
      file.writer->Discard();
      return Error{Code::kFailedPrecondition, "the segments changed while they were compacted"};
    }
    CrashPoint("compact.before_commit");
    PREFIXD_TRY(SwapIn(core, file, sequence, change, [&](const auto& commit_change) {
      return core.tree.Compact(last.id, compacted, change.put_aliases, commit_change);
    }));
  }
  staged.Keep();
  CrashPoint("compact.committed");
  core.counters.compacted++;
  PREFIXD_TRY(core.removal->Free(first));
  PREFIXD_TRY(core.removal->Free(last));
  core.removal->FreeUnneeded({GoneReason::kRemoved, ""});  // both may have been unlisted
  return compacted.id;
}

}  // namespace prefixd::storage
