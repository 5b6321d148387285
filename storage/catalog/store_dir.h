// Manages the store's directory: its lock, its identity, the names inside it.
//
//   lock                          flock; holds the owner's pid
//   STORE                         format version and uuid, readable before anything else is opened
//   catalog/                      RocksDB
//   ballast                       space to release on a full disk (ballast.h)
//   segments/<file>.seg           the rows of one segment
//   segments/<id>.<name>.blob     one blob beside a segment
//   segments/*.tmp                unfinished; removed at open
//   snapshot/                     while a snapshot lives (store/snapshot.h); removed at open
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/result.h"
#include "storage/crypt/cipher.h"
#include "storage/io/file.h"
#include "storage/segment/prefix_info.h"
#include "storage/segment/segment_format.h"

namespace prefixd::storage {

// The store holds a DirLock for its life; the kernel releases it when the process dies.
class DirLock {
 public:
  // Returns kFailedPrecondition naming the owner's pid when another store holds the lock.
  static Result<DirLock> Acquire(const std::filesystem::path& dir);

 private:
  UniqueFd fd_;
};

struct StoreIdentity {
  uint32_t format_version = 0;
  Uuid store{};
  // Of an encrypted store (store_keys.h): the keys that files may need, and the store's secret,
  // wrapped under the key of that id; empty: it has none.
  std::vector<KeyId> keys = {};
  KeyId secret_key = {};
  std::string secret = {};
  bool operator==(const StoreIdentity&) const = default;
};
// Creates directory and identity if missing (writing the identity needs the lock). A newer format
// gives kFailedPrecondition and changes nothing; an older one is upgraded: its data is still read,
// and an older prefixd refuses the store from then on.
Status CreateStoreDir(const std::filesystem::path& dir);
Result<StoreIdentity> ReadOrCreateIdentity(const std::filesystem::path& dir);
// Returns the identity as stored. kCorrupt when the file is missing or malformed.
Result<StoreIdentity> ReadIdentityFile(const std::filesystem::path& dir);
Status WriteIdentityFile(const std::filesystem::path& dir, const StoreIdentity& identity);
// Returns the sentence that says how to rebuild a lost or damaged catalog.
std::string HowToRecover(const std::filesystem::path& dir);
// Appends that sentence to an error that damage could explain.
Error WithHowToRecover(Error error, const std::filesystem::path& dir);

std::filesystem::path SegmentPath(const std::filesystem::path& dir, const Uuid& file);
std::filesystem::path BlobPath(const std::filesystem::path& dir, const SegmentId& id,
                               std::string_view name);
bool ValidBlobName(std::string_view name);  // [A-Za-z0-9_-]{1,64}, dots inside

// A SegmentsEntry is the meaning of a file name in segments/.
struct SegmentsEntry {
  Uuid id{};         // the segment's id for a blob, the file's own otherwise
  std::string blob;  // empty: rows
};
std::optional<SegmentsEntry> ParseSegmentsEntry(std::string_view file_name);
Result<std::vector<std::filesystem::directory_entry>> ListDirectory(
    const std::filesystem::path& dir);

// Refuses to make files as root in a directory of another user, whose daemon could not open them:
// kFailedPrecondition, with the command to use.
Status RefuseAsRoot(const std::filesystem::path& dir);

// Returns kCorrupt when there are segment files but no catalog: opening would make an empty one,
// and recovery would take every segment for an orphan. Changes nothing.
Status RefuseLostCatalog(const std::filesystem::path& dir);

// Writes a temporary file, syncs it, renames it and syncs the directory, with plain calls; for tiny
// files.
Status WriteFileAtomically(const std::filesystem::path& path, std::string_view bytes);

}  // namespace prefixd::storage
