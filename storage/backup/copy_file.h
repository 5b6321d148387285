// Copies files of a backup and digests them. Internal to storage/backup.
//
// Thread-safety: free functions, any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include "prefixd/result.h"
#include "storage/backup/manifest.h"

namespace prefixd::storage {

// Hears how many more bytes are done; false ends the work.
using BytesDone = std::function<bool(uint64_t)>;

struct Copied {
  uint64_t bytes = 0;
  FileDigest digest{};
};
// Copies into a new file, synced. kCancelled: `done` returned false. `unreadable` (null: not
// wanted) tells whether an error is of reading `from`.
Result<Copied> CopyFile(const std::filesystem::path& from, const std::filesystem::path& to,
                        const BytesDone& done, bool* unreadable = nullptr);
// Digests a file as the disk has it, as far as the system lets go of what it has cached.
Result<Copied> DigestFile(const std::filesystem::path& path);

}  // namespace prefixd::storage
