#include "storage/store/remote_segment.h"

#include <fcntl.h>

#include <algorithm>
#include <cstring>

#include "storage/catalog/segment_inspect.h"
#include "storage/catalog/store_dir.h"
#include "storage/io/errors.h"
#include "storage/segment/hex.h"
#include "storage/segment/unix_time.h"
#include "storage/store/open_prefix.h"

namespace prefixd::storage {
namespace {

std::string MetaName(const SegmentId& id) { return "segments/" + id.ToString() + "/meta"; }

std::string PartName(const SegmentHeader& header, uint64_t part) {
  return "segments/" + ToHex(header.segment) + "/" + ToHex(header.file) + "/" +
         std::to_string(part);
}

// Row pages are those between the header and the token ids.
uint64_t RowPages(const SegmentLayout& l) { return l.token_page - 1; }
uint64_t Parts(const SegmentLayout& l) {
  return (RowPages(l) + kRemotePartPages - 1) / kRemotePartPages;
}

ConstPageBytes PageAt(std::span<const std::byte> bytes, uint64_t i) {
  return ConstPageBytes(bytes.data() + i * kPageBytes, kPageBytes);
}

Error Damaged(const SegmentId& id, const std::string& how) {
  return {Code::kCorrupt, "remote segment " + id.ToString() + ": " + how};
}

Status Put(RemoteTier& remote, const std::string& object, std::span<const std::byte> bytes) {
  Status put = remote.PutIfAbsent(object, bytes);
  // Names hold the uuid of the bytes, so an existing object comes from an earlier try.
  if (!put.ok() && put.error().code == Code::kAlreadyExists) return {};
  return put;
}

class Counter {
 public:
  Counter(const Progress& report, uint64_t total) : report_(report), total_(total) {}
  Status Add(uint64_t pages) {
    done_ += pages;
    if (!report_ || report_(std::min(done_, total_), total_, "pages")) return {};
    return Error{Code::kCancelled, "the transfer was stopped"};
  }

 private:
  const Progress& report_;
  const uint64_t total_;
  uint64_t done_ = 0;
};

// Reads pages [first, first + n) of an encrypted file as they are stored, verified.
Status ReadEncrypted(StoreCore& core, const SegmentFile& file, uint64_t first, uint64_t n,
                     std::span<std::byte> out) {
  AlignedBuffer buffer(n * kPageBytes);
  PREFIXD_TRY(ReadFully(*core.engine, file.fd(), first * kPageBytes, buffer.span(),
                        IoPriority::kScrub, "reading a segment to push it"));
  for (uint64_t i = 0; i < n; ++i) {
    if (file.CheckPage(first + i, PageAt(buffer.span(), i))) continue;
    const std::string how = "page " + std::to_string(first + i) + " does not verify";
    core.segments->Quarantine(file.record().id, how);
    return Error{Code::kCorrupt, "segment " + file.record().id.ToString() + ": " + how};
  }
  std::memcpy(out.data(), buffer.data(), buffer.size());
  return {};
}

// Reads pages [first, first + n) of a local file, verified.
Status ReadLocal(StoreCore& core, const SegmentFile& file, uint64_t first, uint64_t n,
                 std::span<std::byte> out) {
  if (file.header().encrypted()) return ReadEncrypted(core, file, first, n, out);
  std::vector<PagePiece> pieces;
  for (uint64_t i = 0; i < n; ++i) {
    pieces.push_back({first + i, 0, kPageBytes, out.data() + i * kPageBytes});
  }
  ReadStats ignored;
  return ReadPieces(core.services, file, pieces, Access::kBackground, &ignored);
}

Status PushSegment(StoreCore& core, const SegmentFile& file, RemoteTier& remote,
                   Counter& progress) {
  const SegmentLayout& l = file.layout();
  std::vector<std::byte> bytes(kRemotePartPages * kPageBytes);
  for (uint64_t part = 0; part < Parts(l); ++part) {
    const uint64_t first = 1 + part * kRemotePartPages;
    const uint64_t n = std::min(kRemotePartPages, l.token_page - first);
    const auto pages = std::span(bytes).first(n * kPageBytes);
    PREFIXD_TRY(ReadLocal(core, file, first, n, pages));
    PREFIXD_TRY(Put(remote, PartName(file.header(), part), pages));
    PREFIXD_TRY(progress.Add(n));
  }
  // The meta object is the header, then everything behind the rows. Table and footer are not in the
  // table: they have checksums of their own, which the reader of the object checks.
  std::vector<std::byte> meta((1 + l.total_pages() - l.token_page) * kPageBytes);
  PREFIXD_TRY(ReadLocal(core, file, 0, 1, std::span(meta).first(kPageBytes)));
  const auto rest = std::span(meta).subspan(kPageBytes);
  const uint64_t small = l.table_page - l.token_page;
  PREFIXD_TRY(ReadLocal(core, file, l.token_page, small, rest.first(small * kPageBytes)));
  AlignedBuffer ends((l.total_pages() - l.table_page) * kPageBytes);
  PREFIXD_TRY(ReadFully(*core.engine, file.fd(), l.table_page * kPageBytes, ends.span(),
                        IoPriority::kScrub, "reading a segment to push it"));
  std::memcpy(rest.data() + small * kPageBytes, ends.data(), ends.size());
  return Put(remote, MetaName({file.header().segment}), meta);
}

// Writes a local file with the same rows, as this store's own.
Status WriteLocal(StoreCore& core, const RemoteSegment& source, const RemoteTier& remote,
                  const std::filesystem::path& path, const SegmentHeader& header, uint64_t sequence,
                  Counter& progress) {
  const SegmentLayout& l = source.layout();
  PREFIXD_ASSIGN(const UniqueFd fd,
                 OpenMaybeDirect(path, O_WRONLY | O_CREAT | O_EXCL, core.direct));
  PREFIXD_TRY(Preallocate(fd.get(), l.file_bytes(), path));
  const auto write = [&](uint64_t page, std::span<const std::byte> bytes) {
    core.counters.bytes_written += bytes.size();
    return WriteFully(*core.engine, fd.get(), page * kPageBytes, bytes, IoPriority::kWrite,
                      "writing " + path.string());
  };
  AlignedBuffer buffer(kRemotePartPages * kPageBytes);
  for (uint64_t first = 1; first < l.token_page; first += kRemotePartPages) {
    const uint64_t n = std::min(kRemotePartPages, l.token_page - first);
    const auto pages = buffer.span().first(n * kPageBytes);
    PREFIXD_TRY(source.ReadPages(remote, first, n, pages));
    PREFIXD_TRY(write(first, pages));
    PREFIXD_TRY(progress.Add(n));
  }
  const auto small = source.small_pages();
  AlignedBuffer behind((l.total_pages() - l.token_page) * kPageBytes);
  std::fill(behind.span().begin(), behind.span().end(), std::byte{0});
  std::memcpy(behind.data(), small.data(), small.size());
  // The header names another store, and the footer another sequence: both are made anew, and with
  // the header its entry in the table.
  AlignedBuffer first_page(kPageBytes);
  const PageSeal& seal = source.seal();
  header.Encode(PageBytes(first_page.data(), kPageBytes), seal.cipher());
  std::vector<uint64_t> table(source.table().begin(), source.table().end());
  seal.Note(0, ConstPageBytes(first_page.data(), kPageBytes), table.data());
  std::memcpy(behind.data() + (l.table_page - l.token_page) * kPageBytes, table.data(),
              table.size() * sizeof(uint64_t));
  SegmentFooter footer = source.footer();
  footer.sequence = sequence;
  footer.table_checksum = TableChecksum(header.file, l.table_page, table);
  footer.sealed_unix_ms = NowUnixMs();
  footer.Encode(PageBytes(behind.data() + (l.footer_page - l.token_page) * kPageBytes, kPageBytes),
                seal.cipher());
  PREFIXD_TRY(write(0, first_page.span()));
  PREFIXD_TRY(write(l.token_page, behind.span()));
  PREFIXD_TRY(DataSync(*core.engine, fd.get(), "syncing " + path.string()));
  return SyncDirectory(path.parent_path());
}

// Returns this store's record of a remote segment.
Result<SegmentRecord> RecordOf(const RemoteSegment& source, const SegmentManifest& manifest) {
  const SegmentHeader& header = source.header();
  SegmentRecord record;
  record.id = {header.segment};
  record.file = header.file;
  record.model = manifest.model.name;
  record.tenant = manifest.tenant;
  record.label = manifest.label;
  record.parent = {header.parent};
  record.tokens = header.tokens;
  record.first_token = source.tokens().front();
  record.file_bytes = source.layout().file_bytes();
  record.created_unix_ms = header.created_unix_ms;
  record.reclustered = source.layout().reclustered();
  record.encoding = header.encoding;
  record.encoding_error = source.footer().error;
  record.lineage = header.lineage;
  record.kept_rows = header.kept_rows;
  if (record.compressed()) {
    PREFIXD_ASSIGN(record.full_bytes, header.FullBytes());
  }
  if (manifest.model.fingerprint != header.model) {
    return Damaged(record.id, "header and manifest are of different models");
  }
  return record;
}

Status PullSegment(StoreCore& core, const RemoteSegment& source, const RemoteTier& remote,
                   Counter& progress) {
  PREFIXD_ASSIGN(const SegmentManifest manifest, DecodeManifest(source.manifest()));
  PREFIXD_ASSIGN(SegmentRecord record, RecordOf(source, manifest));
  PREFIXD_TRY(core.models->Put(manifest.model));
  PREFIXD_ASSIGN(const auto hold, core.models->Hold(record.model));
  PREFIXD_ASSIGN(const RequestScope scope, core.models->Resolve(record.model, record.tenant));

  std::vector<uint32_t> tokens;                // tokens of the whole chain
  std::shared_ptr<const StoredPrefix> parent;  // pinned until the commit
  if (!record.is_root()) {
    PREFIXD_ASSIGN(parent,
                   OpenStoredPrefix(core.shared_from_this(), record.parent, record.tokens.begin));
    tokens.assign(parent->tokens().begin(), parent->tokens().end());
    PREFIXD_ASSIGN(const SegmentRecord continued, core.tree.Record(record.parent));
    if (continued.compressed()) return Compressed(record.parent);
    PREFIXD_TRY(CheckContinues(continued, record));
  }
  const std::vector<uint32_t> own = source.tokens();
  tokens.insert(tokens.end(), own.begin(), own.end());
  const uint32_t block = core.catalog->meta().block_tokens;
  if (record.is_root()) record.lead = LeadOf(own, block);
  auto hashes = core.HashesOf(scope.model.fingerprint, record.tenant, tokens);
  hashes.erase(hashes.begin(), hashes.begin() + record.tokens.begin / block);

  SegmentHeader header = source.header();
  header.store = core.identity.store;
  PREFIXD_ASSIGN(SpaceReservation space,
                 core.room->Reserve(record.tenant, record.file_bytes, Room::kMayEvict));
  SequenceTicket sequence = core.catalog->sequences().Next();
  record.sequence = sequence.number();
  PREFIXD_ASSIGN(const MemoryCharge memory,
                 core.options.MemoryOf(record.tenant)
                     .Take(MemoryKind::kCatalog, PrefixTree::MemoryBytes(record)));
  const auto path = SegmentPath(core.options.dir, record.file);
  std::error_code failed;
  if (std::filesystem::exists(path, failed)) {
    // Another pull has made it, or its commit is in doubt: recovery knows at the next start.
    return Error{Code::kUnavailable, "segment " + record.id.ToString() +
                                         " is being pulled, or was by a pull that failed (" +
                                         path.string() + " is there); try again later"};
  }
  Status written = WriteLocal(core, source, remote, path, header, record.sequence, progress);
  if (written.ok()) {
    std::lock_guard commit(core.commit_mutex);
    if (core.tree.Record(record.id).ok()) {
      written = Error{Code::kAlreadyExists, "the segment was stored meanwhile"};
    } else {
      CatalogChange change;
      change.put.push_back({record, std::move(hashes)});
      // After a failed commit the file stays: recovery knows which files the catalog names.
      written = core.catalog->MayApply();
      if (written.ok()) {
        if (Status committed = core.catalog->Apply(change); !committed.ok()) {
          space.Keep();
          sequence.LeaveOpen();
          return committed;
        }
        space.Settle([&] {
          core.tree.Insert({{record, "", core.options.Now(), 1, NowUnixMs()}, scope.id});
        });
        return {};
      }
    }
  }
  if (Status removed = RemoveFile(path); !removed.ok()) LogWarning(removed.error().message);
  return written;
}

}  // namespace

Result<RemoteSegment> RemoteSegment::Open(const RemoteTier& remote, const SegmentId& id,
                                          const KeyRing* keys) {
  const std::string name = MetaName(id);
  PREFIXD_ASSIGN(const uint64_t bytes, remote.Stat(name));
  constexpr uint64_t kMaxMetaBytes = 8ull << 30;
  if (bytes < 3 * kPageBytes || bytes % kPageBytes != 0 || bytes > kMaxMetaBytes) {
    return Damaged(id, "its meta object has an impossible size");
  }
  RemoteSegment out;
  out.meta_.resize(bytes);
  const RemoteRange all{0, out.meta_};
  PREFIXD_TRY(remote.Read(name, {&all, 1}));
  const uint64_t pages = bytes / kPageBytes;
  PREFIXD_ASSIGN(out.header_, SegmentHeader::Decode(PageAt(out.meta_, 0)));
  PREFIXD_ASSIGN(out.layout_, out.header_.Layout());
  PREFIXD_ASSIGN(out.footer_, SegmentFooter::Decode(PageAt(out.meta_, pages - 1)));
  const SegmentLayout& l = out.layout_;
  if (SegmentId{out.header_.segment} != id || pages != 1 + l.total_pages() - l.token_page ||
      out.footer_.file != out.header_.file || out.footer_.total_pages != l.total_pages()) {
    return Damaged(id, "header, footer and size do not agree");
  }
  PREFIXD_ASSIGN(out.seal_, PageSeal::Of(keys, out.header_, PageAt(out.meta_, 0)));
  PREFIXD_TRY(CheckMac(out.seal_.cipher(), l.footer_page, PageAt(out.meta_, pages - 1)));
  out.table_.resize(l.table_words());
  std::memcpy(out.table_.data(), out.meta_.data() + (1 + l.table_page - l.token_page) * kPageBytes,
              out.table_.size() * sizeof(uint64_t));
  if (TableChecksum(out.header_.file, l.table_page, out.table_) != out.footer_.table_checksum) {
    return Damaged(id, "its checksum table is damaged");
  }
  out.plain_.assign(out.small_pages().begin(), out.small_pages().end());
  for (uint64_t page = l.token_page; page < l.table_page; ++page) {
    const PageBytes plain(out.plain_.data() + (page - l.token_page) * kPageBytes, kPageBytes);
    if (!out.seal_.Open(page, plain, out.seal_.entry(out.table_.data(), page))) {
      return Damaged(id, "page " + std::to_string(page) + " does not verify");
    }
  }
  return out;
}

std::vector<uint32_t> RemoteSegment::tokens() const {
  std::vector<uint32_t> out(layout_.shape.n_tokens);
  std::memcpy(out.data(), plain_.data(), out.size() * sizeof(uint32_t));
  return out;
}

std::string RemoteSegment::manifest() const {
  const size_t at = (layout_.manifest_page - layout_.token_page) * kPageBytes;
  return {reinterpret_cast<const char*>(plain_.data()) + at, layout_.shape.manifest_bytes};
}

std::span<const std::byte> RemoteSegment::small_pages() const {
  return std::span(meta_).subspan(kPageBytes,
                                  (layout_.table_page - layout_.token_page) * kPageBytes);
}

Status RemoteSegment::ReadPages(const RemoteTier& remote, uint64_t first, uint64_t n,
                                std::span<std::byte> out) const {
  for (uint64_t done = 0; done < n;) {
    const uint64_t part = (first + done - 1) / kRemotePartPages;
    const uint64_t in_part = (first + done - 1) % kRemotePartPages;
    const uint64_t take = std::min(n - done, kRemotePartPages - in_part);
    const RemoteRange range{in_part * kPageBytes,
                            out.subspan(done * kPageBytes, take * kPageBytes)};
    PREFIXD_TRY(remote.Read(PartName(header_, part), {&range, 1}));
    done += take;
  }
  for (uint64_t i = 0; i < n; ++i) {
    if (!seal_.Check(first + i, PageAt(out, i), seal_.entry(table_.data(), first + i))) {
      return Damaged({header_.segment}, "page " + std::to_string(first + i) + " does not verify");
    }
  }
  return {};
}

Status PushChain(StoreCore& core, const SegmentId& id, RemoteTier& remote,
                 const Progress& progress) {
  PREFIXD_ASSIGN(const ChainPin pin, core.tree.Pin(core.tree.Resolve(id).first));
  std::vector<std::shared_ptr<const SegmentFile>> files;
  uint64_t pages = 0;
  for (const SegmentRecord& record : pin.chain()) {
    if (record.compressed()) {
      return Error{Code::kFailedPrecondition,
                   "prefix " + id.ToString() +
                       " is compressed: its summaries stay here, and could not be made again where "
                       "it is pulled"};
    }
    // The segment is there already, and its tokens cannot have changed.
    if (remote.Stat(MetaName(record.id)).ok()) continue;
    PREFIXD_ASSIGN(files.emplace_back(), core.segments->Open(record.id));
    pages += RowPages(files.back()->layout());
  }
  Counter counter(progress, pages);
  for (const auto& file : files) PREFIXD_TRY(PushSegment(core, *file, remote, counter));
  return {};
}

Status PullChain(StoreCore& core, const SegmentId& id, const RemoteTier& remote,
                 const Progress& progress) {
  std::vector<RemoteSegment> missing;  // leaf first
  uint64_t pages = 0;
  for (SegmentId at = id; at != SegmentId{} && !core.tree.Record(at).ok();
       at = {missing.back().header().parent}) {
    PREFIXD_ASSIGN(RemoteSegment segment, RemoteSegment::Open(remote, at, core.keys.get()));
    if (!missing.empty() && segment.header().tokens.begin >= missing.back().header().tokens.begin) {
      return Damaged(at, "it does not begin before the segment that continues it");
    }
    pages += RowPages(segment.layout());
    missing.push_back(std::move(segment));
  }
  Counter counter(progress, pages);
  for (auto segment = missing.rbegin(); segment != missing.rend(); ++segment) {
    Status pulled = PullSegment(core, *segment, remote, counter);
    if (!pulled.ok() && pulled.error().code != Code::kAlreadyExists) return pulled;
  }
  return {};
}

Status DeleteRemote(RemoteTier& remote, const SegmentId& id, const KeyRing* keys) {
  auto segment = RemoteSegment::Open(remote, id, keys);
  PREFIXD_TRY(remote.Delete(MetaName(id)));
  if (!segment.ok()) {
    return segment.error().code == Code::kNotFound ? Status() : Status(segment.error());
  }
  for (uint64_t part = 0; part < Parts(segment->layout()); ++part) {
    PREFIXD_TRY(remote.Delete(PartName(segment->header(), part)));
  }
  return {};
}

}  // namespace prefixd::storage
