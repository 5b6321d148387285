// Copies a store that does not change (a snapshot of one) into a backup, and a backup into a new
// store.
//
// A backup is a directory of generations. Files that the last one holds are not copied again; a
// generation counts once BACKUP names it, and only then the files of the one before go. So there is
// a whole backup at every moment, whatever ends the work:
//
//   lock                    flock: one backup or restore at a time
//   BACKUP                  which generation counts, and the checksum of its manifest
//   manifest-<generation>   its files: name, checksum, and where in data/ they lie (manifest.h)
//   data/<generation>-<n>   the files
//
// Thread-safety: free functions; any number may run on different directories.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "prefixd/result.h"
#include "storage/crypt/key_ring.h"
#include "storage/io/progress.h"

namespace prefixd::storage {

struct BackupReport {
  uint64_t generation = 0;
  uint64_t files = 0, bytes = 0;          // of the whole generation
  uint64_t new_files = 0, new_bytes = 0;  // copied by this call
  uint64_t dropped_files = 0;             // of generations before, removed
  // Segments and derived data that do not verify, cannot be read or are gone, and why. They are not
  // in the backup, unless an earlier generation held the segment whole.
  std::vector<std::string> damaged;
};

// Makes a new generation in `to` (created if missing) of the store in `from`, whose files must not
// change meanwhile. Each copied file is synced and read back: segments against their own checksums,
// others against what was read. kFailedPrecondition: `to` is the backup of another store, is in
// use, or is no backup and not empty; kCancelled: `progress` (in bytes) returned false. What is
// encrypted stays so; without its key (in `keys`, null: none) a segment is checked against what was
// read alone. verify: what earlier backups copied is read, too, and copied again where it does not
// verify.
Result<BackupReport> WriteBackup(const std::filesystem::path& from, const std::filesystem::path& to,
                                 const Progress& progress, const KeyRing* keys = nullptr,
                                 bool verify = false);

struct RestoreReport {
  uint64_t generation = 0;
  int64_t created_unix_ms = 0;
  uint64_t files = 0, bytes = 0;
  // Segments and derived data that do not verify or cannot be read, and why. They are left out: the
  // store quarantines the one and makes the other again.
  std::vector<std::string> damaged;
};

// Writes the store of a backup into `to`, which is missing or empty, and checks every byte.
// kCorrupt: the catalog does not verify, or STORE. After an error `to` is empty again.
Result<RestoreReport> RestoreBackup(const std::filesystem::path& from,
                                    const std::filesystem::path& to, const Progress& progress);

}  // namespace prefixd::storage
