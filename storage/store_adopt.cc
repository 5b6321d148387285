// After the catalog's log had to be cut: sealed segments that it does not know are committed again.
// An acknowledged put left a sealed file and an acknowledged removal none, so nothing acknowledged
// is missing afterwards; a put that was about to commit may appear.
#include <fcntl.h>

#include <algorithm>
#include <filesystem>

#include "storage/crash_point.h"
#include "storage/errors.h"
#include "storage/file.h"
#include "storage/page_reader.h"
#include "storage/segment_file.h"
#include "storage/store_core.h"

namespace prefixd::storage {
namespace fs = std::filesystem;
namespace {

struct Candidate {
  SegmentRecord record;
  SegmentManifest manifest;
};

Result<std::vector<std::byte>> ReadPages(IoEngine& engine, int fd, uint64_t first, uint64_t n,
                                         const fs::path& path) {
  AlignedBuffer buffer(n * kPageBytes);
  PREFIXD_TRY(ReadFully(engine, fd, first * kPageBytes, buffer.span(), IoPriority::kStepRead,
                        path.string()));
  return std::vector<std::byte>(buffer.data(), buffer.data() + n * kPageBytes);
}

// What the file says of itself. kCorrupt: it was not sealed, or is damaged.
Result<Candidate> ReadCandidate(IoEngine& engine, const fs::path& path, const SegmentId& id,
                                bool direct) {
  const Error unsealed{Code::kCorrupt, path.string() + " is not a sealed segment"};
  PREFIXD_ASSIGN(const UniqueFd fd, OpenMaybeDirect(path, O_RDONLY, direct));
  PREFIXD_ASSIGN(const uint64_t bytes, FileBytes(fd.get(), path));
  if (bytes % kPageBytes != 0 || bytes < 2 * kPageBytes) return unsealed;
  PREFIXD_ASSIGN(const auto first, ReadPages(engine, fd.get(), 0, 1, path));
  PREFIXD_ASSIGN(const SegmentHeader header,
                 SegmentHeader::Decode(ConstPageBytes(first.data(), kPageBytes)));
  PREFIXD_ASSIGN(const SegmentLayout layout, header.Layout());
  if (layout.file_bytes() != bytes || header.segment != id.bytes) return unsealed;
  PREFIXD_ASSIGN(const auto last, ReadPages(engine, fd.get(), layout.footer_page, 1, path));
  PREFIXD_ASSIGN(const SegmentFooter footer,
                 SegmentFooter::Decode(ConstPageBytes(last.data(), kPageBytes)));
  PREFIXD_ASSIGN(const auto manifest, ReadPages(engine, fd.get(), layout.manifest_page,
                                                layout.table_page - layout.manifest_page, path));
  Candidate c;
  PREFIXD_ASSIGN(c.manifest, DecodeManifest({reinterpret_cast<const char*>(manifest.data()),
                                             header.manifest_bytes}));
  if (c.manifest.model.fingerprint != header.model) return unsealed;
  c.record.id = id;
  c.record.sequence = footer.sequence;
  c.record.model = c.manifest.model.name;
  c.record.tenant = c.manifest.tenant;
  c.record.label = c.manifest.label;
  c.record.parent.bytes = header.parent;
  c.record.tokens = header.tokens;
  c.record.file_bytes = bytes;
  c.record.created_unix_ms = header.created_unix_ms;
  return c;
}

// The segments from the root down to `leaf`, which the tree need not know. kCorrupt: one is
// missing.
Result<std::vector<SegmentRecord>> ChainOf(const PrefixTree& tree, const SegmentRecord& leaf) {
  std::vector<SegmentRecord> chain{leaf};
  const std::vector<SegmentRecord> known = tree.Records();
  while (!chain.back().is_root()) {
    const auto parent = std::find_if(known.begin(), known.end(), [&](const SegmentRecord& r) {
      return r.id == chain.back().parent;
    });
    if (parent == known.end()) {
      return Error{Code::kCorrupt, "segment " + leaf.id.ToString() + " continues an unknown one"};
    }
    chain.push_back(*parent);
  }
  std::reverse(chain.begin(), chain.end());
  return chain;
}

}  // namespace

Status StoreCore::AdoptSegment(const SegmentRecord& sealed, const ModelRecord& model) {
  PREFIXD_ASSIGN(const auto chain, ChainOf(tree, sealed));
  const fs::path path = SegmentPath(options.dir, sealed.id);
  std::vector<uint32_t> tokens;
  for (size_t i = 0; i < chain.size(); ++i) {
    PREFIXD_ASSIGN(
        const auto file,
        SegmentFile::Open(*engine, SegmentPath(options.dir, chain[i].id), chain[i], direct));
    const TokenRange own = chain[i].tokens;
    const uint32_t end = i + 1 < chain.size() ? chain[i + 1].tokens.begin : own.end;
    if (own.begin != tokens.size() || end <= own.begin || end > own.end) {
      return Error{Code::kCorrupt, "segment " + sealed.id.ToString() + " does not fit its parent"};
    }
    const auto ids = file->tokens().first(end - own.begin);
    tokens.insert(tokens.end(), ids.begin(), ids.end());
    if (i + 1 == chain.size()) {
      PREFIXD_TRY(VerifyAllPages(services, *file, [](uint64_t) { return true; }));
    }
  }
  if (const auto known = models_.find(model.name); known == models_.end()) {
    PREFIXD_TRY(PutModel(model));
  } else if (known->second.fingerprint != model.fingerprint) {
    return Error{Code::kCorrupt, "segment " + sealed.id.ToString() + " is of another model '" +
                                     model.name + "' than the store's"};
  }
  CrashPoint("adopt.before_commit");
  SegmentRecord record = sealed;
  record.first_token = tokens[record.tokens.begin];
  const uint32_t block = catalog->meta().block_tokens;
  const auto hashes = BlockHashes(model.fingerprint, record.tenant, tokens, block);
  PREFIXD_TRY(
      catalog->CommitSegment(record, std::span(hashes).subspan(record.tokens.begin / block)));
  tree.Insert({record, "", record.created_unix_ms}, PrefixScope(model.fingerprint, record.tenant));
  next_sequence = std::max<uint64_t>(next_sequence, record.sequence + 1);
  LogInfo("recovery committed segment " + record.id.ToString() + " again");
  return {};
}

Status StoreCore::AdoptSegments() {
  const fs::path note = options.dir / kLogWasCut;
  std::error_code error;
  if (!fs::exists(note, error)) return {};
  std::vector<Candidate> sealed;
  for (auto it = fs::directory_iterator(options.dir / "segments", error);
       !error && it != fs::directory_iterator(); it.increment(error)) {
    const auto entry = ParseSegmentsEntry(it->path().filename().string());
    if (!entry || !entry->blob.empty() || tree.Info(entry->id).ok()) continue;
    auto candidate = ReadCandidate(*engine, it->path(), entry->id, direct);
    if (candidate.ok()) {
      sealed.push_back(std::move(*candidate));
    } else if (candidate.error().code != Code::kCorrupt) {
      return candidate.error();
    }
  }
  if (error) return ErrnoError(error.value(), "cannot list " + note.parent_path().string());
  std::sort(sealed.begin(), sealed.end(), [](const Candidate& a, const Candidate& b) {
    return a.record.sequence < b.record.sequence;  // parents first
  });
  for (const Candidate& c : sealed) {
    Status adopted = AdoptSegment(c.record, c.manifest.model);
    if (adopted.ok()) continue;
    if (adopted.error().code != Code::kCorrupt) return adopted;
    LogWarning("not recovered: " + adopted.error().message);
  }
  CrashPoint("adopt.done");
  PREFIXD_TRY(RemoveFile(note));
  return SyncDirectory(options.dir);
}

}  // namespace prefixd::storage
