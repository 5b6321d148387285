// Stores what is small and must be transactional: models, segment records, block hashes. Each
// mutation is one atomic write; those marked synced are durable when they return. Segment bytes
// never go here.
//
// The number of a segment's children is not stored: it follows from the records' parents.
// Thread-safety: all methods may be called concurrently. Errors: kIo from the database, kCorrupt
// for values that do not decode.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/result.h"
#include "storage/catalog/sequences.h"
#include "storage/crypt/cipher.h"
#include "storage/segment/gone_record.h"
#include "storage/segment/identity.h"
#include "storage/segment/records.h"
#include "storage/segment/segment_format.h"

namespace prefixd::storage {

struct CatalogMeta {
  uint32_t format_version = 0;
  uint32_t block_tokens = 0;  // fixed when the store is made: stored hashes depend on it
  Uuid store{};
};
// Opening a store of version 1 upgrades it.
inline constexpr uint32_t kStoreFormatVersion = 2;
// That of a store with encrypted files, which its STORE says so that an older prefixd refuses it.
// Its catalog has the version above.
inline constexpr uint32_t kEncryptedFormatVersion = 3;

// A CatalogSegment is one segment's row as loaded when the store opens.
struct CatalogSegment {
  SegmentRecord record;
  std::string quarantine;  // the reason; empty: sound
  int64_t last_used_unix_ms = 0;
  float heat = 1;                // uses, those before the last one decayed (eviction.h)
  int64_t verified_unix_ms = 0;  // last full verification; at first, the put's time
};

// A CatalogChange lists the rows that change in one atomic write.
struct CatalogChange {
  struct Put {
    SegmentRecord record;
    // The hashes of the blocks that end in the segment; absent: the stored ones stay.
    std::optional<std::vector<BlockHash>> hashes;
  };
  std::vector<SegmentId> remove;  // with their hashes; applied before `put`
  // What the history keeps of those among them whose tokens go for good; their blocks, and those of
  // nobody else, are filled in.
  std::vector<GoneRecord> gone;
  std::vector<Put> put;
  std::vector<SegmentId> remove_aliases;
  std::vector<AliasRecord> put_aliases;
};

// A ScrubPosition says which page of which file the scrub reads next; all zero: no file.
struct ScrubPosition {
  Uuid file{};
  uint64_t next_page = 0;
};

// What an open catalog takes: the database's cache, which its write buffers and the indexes of its
// files share, and as much again for what the cache does not count.
inline constexpr uint64_t kCatalogCacheBytes = 16ull << 20;
inline constexpr uint64_t kCatalogMemoryBytes = 2 * kCatalogCacheBytes;

class Catalog {
 public:
  // Creates an empty catalog with `fresh` if there is none. `make_room` runs before every write and
  // refuses it where the disk is so full that the database would fail in the middle. secret: seals
  // the records of models, segments and aliases; null: they lie in clear.
  static Result<std::unique_ptr<Catalog>> Open(const std::filesystem::path& dir,
                                               const CatalogMeta& fresh,
                                               std::function<Status()> make_room = {},
                                               std::shared_ptr<const StoreSecret> secret = nullptr);
  virtual ~Catalog() = default;

  virtual const CatalogMeta& meta() const = 0;
  virtual Status PutModel(const ModelRecord& model) = 0;  // synced
  virtual Result<std::vector<ModelRecord>> LoadModels() const = 0;
  virtual Status RemoveModel(std::string_view name) = 0;  // synced

  // Returns the numbers for segment files; every Apply stores which of them are decided.
  virtual Sequences& sequences() = 0;
  // Writes synced and atomically: the commit point of puts, removals, reclustering and compaction.
  // Apply calls never overlap.
  virtual Status Apply(const CatalogChange& change) = 0;
  // The error with which Apply would be refused now, before anything is written: `make_room`'s.
  virtual Status MayApply() = 0;
  // Adds to the history of what is gone, which is bounded (gone_history.h). Not synced.
  virtual Status NoteGone(const GoneRecord& record) = 0;
  // Returns the latest record of the tenant that names this block.
  virtual Result<std::optional<GoneRecord>> FindGone(std::string_view tenant,
                                                     const BlockHash& block) const = 0;
  virtual Status SetQuarantine(const SegmentId& id, const std::string& reason) = 0;  // "" lifts it
  virtual Status SetLastUsed(const SegmentId& id, int64_t unix_ms, float heat) = 0;  // not synced
  virtual Status SetVerified(const SegmentId& id, int64_t unix_ms) = 0;              // not synced
  virtual Status SetScrubPosition(const ScrubPosition& position) = 0;                // not synced
  virtual Result<ScrubPosition> LoadScrubPosition() const = 0;
  // Writes all that is committed now into the new directory `dir` on the same file system, as a
  // catalog that Open opens.
  virtual Status CopyTo(const std::filesystem::path& dir) const = 0;
  // A row that does not decode is returned with its id alone and no tokens.
  virtual Result<std::vector<CatalogSegment>> LoadSegments() const = 0;
  virtual Result<std::vector<AliasRecord>> LoadAliases() const = 0;

  // Returns the segments in which a block with this chained hash ends; usually none or one.
  virtual Result<std::vector<SegmentId>> FindBlock(const BlockHash& hash) const = 0;
};

}  // namespace prefixd::storage
