// Adopts commits that the catalog lost. A power cut may tear the end of its log, and a disk may
// damage it: RocksDB drops everything behind the damage. The segments of such commits are still
// there, sealed, under numbers that the catalog has not decided about (sequences.h); those that
// verify to the last byte are committed again. A put that was about to commit when the machine
// stopped looks the same, and appears too: it is complete.
#include <algorithm>
#include <filesystem>
#include <set>

#include "storage/catalog/segment_inspect.h"
#include "storage/core/store_core.h"
#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/store/store_match.h"
#include "storage/store/store_recovery.h"

namespace prefixd::storage {
namespace fs = std::filesystem;
namespace {

struct Candidate {
  fs::path path;
  SegmentEnds ends;
};

// A Fate says what becomes of a candidate.
enum class Fate { kAdopted, kNotNeeded, kLeftAlone };

class Adopter {
 public:
  explicit Adopter(StoreCore& core) : core_(core) {}

  // Returns kCorrupt for a candidate that does not verify: it was never acknowledged, or is
  // damaged.
  Result<Fate> Adopt(const Candidate& candidate) {
    PREFIXD_ASSIGN(const InspectedSegment found,
                   InspectSegment(*core_.engine, candidate.path, core_.direct, core_.keys.get()));
    if (found.manifest.live) return Fate::kNotNeeded;  // its session is gone
    PREFIXD_TRY(VerifyAllPages(Unheard(), *found.file, [](uint64_t) { return true; }));
    SegmentRecord record = found.file->record();
    if (const auto known = core_.tree.Record(record.id); known.ok()) {
      return AdoptRewritten(*known, record);
    }
    std::vector<SegmentId> replaced;
    bool all_sound = true;
    for (const SegmentId& id : found.manifest.replaces) {
      const auto old = core_.tree.Record(id);
      if (!old.ok()) continue;
      replaced.push_back(id);
      all_sound &= IsSound(*old);
    }
    if (!replaced.empty() && all_sound) return Fate::kNotNeeded;  // compacted, but never committed
    // Only the candidate may continue the segments that it replaces.
    const bool alone = replaced.empty();
    for (const SegmentRecord& other : alone ? std::vector<SegmentRecord>() : core_.tree.Records()) {
      if (Contains(replaced, other.parent) && !Contains(replaced, other.id)) {
        return Fate::kLeftAlone;
      }
    }
    return AdoptNew(found, std::move(record), replaced);
  }

 private:
  static bool Contains(const std::vector<SegmentId>& ids, const SegmentId& id) {
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  }

  // Returns services for files that are not the store's yet: a damaged page quarantines nothing.
  ReadServices Unheard() const {
    ReadServices services = core_.services;
    services.on_corrupt = [](const SegmentId&, const std::string&) {};
    return services;
  }

  bool IsSound(const SegmentRecord& record) const {
    return SegmentFile::Check(*core_.engine, SegmentPath(core_.options.dir, record.file), record,
                              core_.direct, core_.keys.get())
        .ok();
  }

  // The store knows the segment in another file, so the candidate is needed only if that file is
  // gone.
  Result<Fate> AdoptRewritten(const SegmentRecord& known, const SegmentRecord& found) {
    if (IsSound(known) || known.tokens != found.tokens || known.parent != found.parent) {
      return Fate::kNotNeeded;
    }
    SegmentRecord record = known;
    record.file = found.file;
    record.sequence = found.sequence;
    record.file_bytes = found.file_bytes;
    record.reclustered = found.reclustered;
    record.encoding = found.encoding;
    record.encoding_error = found.encoding_error;
    record.kept_rows = found.kept_rows;
    record.full_bytes = found.full_bytes;
    if (record.compressed() && core_.tree.HasChildren(record.id)) return Fate::kLeftAlone;
    CatalogChange change;
    change.put.push_back({record, std::nullopt});
    CrashPoint("adopt.before_rewritten");
    PREFIXD_TRY(
        core_.tree.Update(record, known.file, [&] { return core_.catalog->Apply(change); }));
    core_.segments->LiftQuarantine(record.id);
    return Fate::kAdopted;
  }

  Result<Fate> AdoptNew(const InspectedSegment& found, SegmentRecord record,
                        std::vector<SegmentId> replaced) {
    if (!core_.models->Put(found.manifest.model).ok()) return Fate::kLeftAlone;
    PREFIXD_ASSIGN(const RequestScope scope, core_.models->Resolve(record.model, record.tenant));
    std::vector<SegmentRecord> chain;
    if (!record.is_root()) {
      auto pin = core_.tree.Pin(record.parent);
      if (!pin.ok() || !CheckContinues(pin->chain().back(), record).ok()) return Fate::kLeftAlone;
      chain = pin->chain();
    }
    chain.push_back(record);
    PREFIXD_ASSIGN(const auto tokens, ChainTokens(*core_.engine, core_.options.dir, chain,
                                                  core_.direct, core_.keys.get()));
    const uint32_t block = core_.catalog->meta().block_tokens;
    const auto hashes = core_.HashesOf(scope.model.fingerprint, record.tenant, tokens);
    PREFIXD_ASSIGN(const Match stored,
                   FindLongest(core_, scope, hashes, tokens, {false, record.lineage}));
    if (stored.n_tokens == tokens.size()) return Fate::kNotNeeded;

    if (record.is_root()) record.lead = LeadOf(tokens, block);
    CatalogChange change;
    change.remove = replaced;
    change.put.push_back({record, OwnHashes(hashes, record.tokens.begin, block)});
    for (AliasRecord alias : found.manifest.aliases) {
      const bool taken = core_.tree.Record(alias.id).ok() && !Contains(replaced, alias.id);
      if (taken || alias.n_tokens > record.tokens.end) continue;
      alias.segment = record.id;
      change.put_aliases.push_back(std::move(alias));
    }
    CrashPoint("adopt.before_commit");
    PREFIXD_TRY(core_.catalog->Apply(change));
    CrashPoint("adopt.committed");
    // Children are erased first: `replaces` names the leaf before its parent.
    for (const SegmentId& id : replaced) {
      PREFIXD_TRY(core_.tree.Erase(id, [] { return Status(); }));
    }
    core_.tree.Insert({{record, "", record.created_unix_ms, 1, record.created_unix_ms}, scope.id});
    for (const AliasRecord& alias : change.put_aliases) core_.tree.InsertAlias(alias);
    return Fate::kAdopted;
  }

  StoreCore& core_;
};

}  // namespace

Result<std::set<Uuid>> AdoptLostCommits(StoreCore& core, OpeningLog& log) {
  std::set<Uuid> left_alone;
  std::set<Uuid> known;
  for (const SegmentRecord& record : core.tree.Records()) known.insert(record.file);
  std::vector<Candidate> candidates;
  PREFIXD_ASSIGN(const auto entries, ListDirectory(core.options.dir / "segments"));
  uint64_t looked_at = 0;
  for (const fs::directory_entry& entry : entries) {
    log.Note(looked_at++, entries.size(), "files compared with the catalog");
    const auto parsed = ParseSegmentsEntry(entry.path().filename().string());
    if (!parsed || !parsed->blob.empty() || known.contains(parsed->id)) continue;
    const auto leave = [&](const std::string& why) {
      left_alone.insert(parsed->id);
      LogWarning("left alone: " + entry.path().string() + ": " + why);
    };
    auto ends = ReadSegmentEnds(*core.engine, entry.path(), core.direct, core.keys.get());
    if (!ends.ok()) {
      if (ends.error().code != Code::kCorrupt) leave(ends.error().message);
    } else if (ends->header.store != core.identity.store || ends->header.file != parsed->id) {
      leave("it belongs to another store or carries another's name");
    } else if (!core.catalog->sequences().WasDecided(ends->footer.sequence)) {
      candidates.push_back({entry.path(), std::move(*ends)});
    }
  }
  // All candidates are noted before the first commit, which stores which numbers are still
  // undecided.
  for (const Candidate& c : candidates) {
    core.catalog->sequences().FoundUndecided(c.ends.footer.sequence);
  }
  // Parents come before children, and several files of one segment the latest first.
  std::sort(candidates.begin(), candidates.end(), [](const Candidate& a, const Candidate& b) {
    const uint32_t a_begin = a.ends.header.tokens.begin, b_begin = b.ends.header.tokens.begin;
    if (a_begin != b_begin) return a_begin < b_begin;
    return a.ends.footer.sequence > b.ends.footer.sequence;
  });
  Adopter adopter(core);
  uint64_t tried = 0;
  for (const Candidate& c : candidates) {
    log.Note(tried++, candidates.size(), "lost commits read");
    const auto fate = adopter.Adopt(c);
    if (!fate.ok() && fate.error().code != Code::kCorrupt) return fate.error();
    if (!fate.ok()) {
      LogWarning("not committed again: " + fate.error().message);
    } else if (*fate == Fate::kAdopted) {
      ++core.counters.recovered_commits;
      LogWarning("committed again: " + c.path.string() +
                 " is whole, and the catalog had lost its record");
    } else if (*fate == Fate::kLeftAlone) {
      left_alone.insert(c.ends.header.file);
      LogWarning("left alone: " + c.path.string() +
                 " is whole, but what it belongs to is missing or damaged");
      continue;
    }
    core.catalog->sequences().Decide(c.ends.footer.sequence);
  }
  return left_alone;
}

}  // namespace prefixd::storage
