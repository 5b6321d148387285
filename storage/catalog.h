// What is small and must be transactional: models, segment records, block hashes. Each mutation is
// one atomic write; those marked synced are durable when they return. Segment bytes never go here.
//
// The number of a segment's children is not stored: it follows from the records' parents.
// Thread-safety: all methods may be called concurrently. Errors: kIo from the database, kCorrupt
// for values that do not decode.
#pragma once

#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "attention/result.h"
#include "storage/identity.h"
#include "storage/records.h"
#include "storage/segment_format.h"

namespace prefixd::storage {

struct CatalogMeta {
  uint32_t format_version = 0;
  uint32_t block_tokens = 0;  // fixed when the store is made: stored hashes depend on it
  Uuid store{};
};
inline constexpr uint32_t kStoreFormatVersion = 1;

// What to do about a damaged commit log: fail with kCorrupt, or drop what follows the damage. A
// power cut can leave the record that was being written torn; nothing acknowledged follows it then,
// but the log alone cannot tell that from rot.
enum class LogDamage : uint8_t { kRefuse, kCut };

// One row as loaded at open.
struct CatalogSegment {
  SegmentRecord record;
  std::string quarantine;  // why; empty: sound
  int64_t last_used_unix_ms = 0;
};

class Catalog {
 public:
  // Creates an empty catalog with `fresh` if there is none.
  static Result<std::unique_ptr<Catalog>> Open(const std::filesystem::path& dir,
                                               const CatalogMeta& fresh, LogDamage on_damage);
  virtual ~Catalog() = default;

  virtual const CatalogMeta& meta() const = 0;
  virtual Status PutModel(const ModelRecord& model) = 0;  // synced
  virtual Result<std::vector<ModelRecord>> LoadModels() const = 0;

  // Synced: the commit point of a put. `hashes` are those of the blocks that end in the segment.
  virtual Status CommitSegment(const SegmentRecord& record, std::span<const BlockHash> hashes) = 0;
  virtual Status RemoveSegment(const SegmentId& id) = 0;  // synced; with its hashes
  virtual Status SetQuarantine(const SegmentId& id, const std::string& reason) = 0;  // "" lifts it
  virtual Status SetLastUsed(const SegmentId& id, int64_t unix_ms) = 0;              // not synced
  virtual Result<std::vector<CatalogSegment>> LoadSegments() const = 0;

  // Segments in which a block with this chained hash ends; usually none or one.
  virtual Result<std::vector<SegmentId>> FindBlock(const BlockHash& hash) const = 0;
};

}  // namespace prefixd::storage
