// The store's directory: its lock, its identity, the names inside it.
//
//   lock                          flock; holds the owner's pid
//   STORE                         format version and uuid, readable before anything else is opened
//   catalog/                      RocksDB
//   segments/<hex>.seg            one segment
//   segments/<hex>.<name>.blob    one blob beside it
//   segments/*.tmp                unfinished; removed at open
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "attention/result.h"
#include "storage/file.h"
#include "storage/prefix_store.h"
#include "storage/segment_format.h"

namespace prefixd::storage {

// Held for the life of a store; the kernel releases it when the process dies.
class DirLock {
 public:
  // kFailedPrecondition naming the owner's pid when another store holds it.
  static Result<DirLock> Acquire(const std::filesystem::path& dir);

 private:
  UniqueFd fd_;
};

struct StoreIdentity {
  uint32_t format_version = 0;
  Uuid store{};
};
// Creates directory and identity if missing (needs the lock for the latter). A newer format gives
// kFailedPrecondition and nothing is changed.
Status CreateStoreDir(const std::filesystem::path& dir);
Result<StoreIdentity> ReadOrCreateIdentity(const std::filesystem::path& dir);

std::filesystem::path SegmentPath(const std::filesystem::path& dir, const SegmentId& id);
std::filesystem::path BlobPath(const std::filesystem::path& dir, const SegmentId& id,
                               std::string_view name);
bool ValidBlobName(std::string_view name);  // [A-Za-z0-9_-]{1,64}, dots inside

// What a file name in segments/ stands for.
struct SegmentsEntry {
  SegmentId id;
  std::string blob;  // empty: the segment itself
};
std::optional<SegmentsEntry> ParseSegmentsEntry(std::string_view file_name);

// There while commits that a cut log may have lost are being made again.
inline constexpr const char* kLogWasCut = "log-was-cut";

// kCorrupt when there are segment files but no catalog: opening would make an empty one, and
// recovery would take every segment for an orphan. Nothing is changed.
Status RefuseLostCatalog(const std::filesystem::path& dir);

// Writes temp + fsync + rename + fsync of the directory with plain calls; for tiny files.
Status WriteFileAtomically(const std::filesystem::path& path, std::string_view bytes);

}  // namespace prefixd::storage
