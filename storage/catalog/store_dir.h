// The store's directory: its lock, its identity, the names inside it.
//
//   lock                          flock; holds the owner's pid
//   STORE                         format version and uuid, readable before anything else is opened
//   catalog/                      RocksDB
//   ballast                       room to give away on a full disk (ballast.h)
//   segments/<file>.seg           the rows of one segment
//   segments/<id>.<name>.blob     one blob beside a segment
//   segments/*.tmp                unfinished; removed at open
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/result.h"
#include "storage/io/file.h"
#include "storage/segment/prefix_info.h"
#include "storage/segment/segment_format.h"

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
// kFailedPrecondition and nothing is changed; an older one is upgraded: what it wrote is still
// read, and an older prefixd refuses the store from then on.
Status CreateStoreDir(const std::filesystem::path& dir);
Result<StoreIdentity> ReadOrCreateIdentity(const std::filesystem::path& dir);
// As they are. kCorrupt when the file is missing or malformed.
Result<StoreIdentity> ReadIdentityFile(const std::filesystem::path& dir);
Status WriteIdentityFile(const std::filesystem::path& dir, const StoreIdentity& identity);
// The sentence that says how a lost or damaged catalog is made again.
std::string HowToRecover(const std::filesystem::path& dir);
// Adds it to an error that damage could explain.
Error WithHowToRecover(Error error, const std::filesystem::path& dir);

std::filesystem::path SegmentPath(const std::filesystem::path& dir, const Uuid& file);
std::filesystem::path BlobPath(const std::filesystem::path& dir, const SegmentId& id,
                               std::string_view name);
bool ValidBlobName(std::string_view name);  // [A-Za-z0-9_-]{1,64}, dots inside

// What a file name in segments/ stands for.
struct SegmentsEntry {
  Uuid id{};         // of the segment for a blob, of the file itself otherwise
  std::string blob;  // empty: rows
};
std::optional<SegmentsEntry> ParseSegmentsEntry(std::string_view file_name);
Result<std::vector<std::filesystem::directory_entry>> ListDirectory(
    const std::filesystem::path& dir);

// kCorrupt when there are segment files but no catalog: opening would make an empty one, and
// recovery would take every segment for an orphan. Nothing is changed.
Status RefuseLostCatalog(const std::filesystem::path& dir);

// Writes temp + fsync + rename + fsync of the directory with plain calls; for tiny files.
Status WriteFileAtomically(const std::filesystem::path& path, std::string_view bytes);

}  // namespace prefixd::storage
