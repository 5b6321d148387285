// Says what one generation of a backup holds. Internal to storage/backup.
//
// Thread-safety: plain values and free functions.
#pragma once

#include <array>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "prefixd/result.h"
#include "storage/segment/segment_format.h"

namespace prefixd::storage {

inline constexpr uint32_t kBackupFormatVersion = 1;

using FileDigest = std::array<uint8_t, 32>;  // BLAKE2b-256
FileDigest DigestOf(std::string_view bytes);

struct BackupFile {
  std::string name;     // in the store: "STORE", "segments/....seg"
  std::string kept_as;  // in data/
  uint64_t bytes = 0;
  FileDigest digest{};
  // Of the file that was copied: one that has the same is not copied again.
  uint64_t inode = 0;
  int64_t changed_ns = 0;
};

struct BackupManifest {
  Uuid store{};
  uint64_t generation = 0;
  int64_t created_unix_ms = 0;
  std::vector<BackupFile> files;
};

std::string EncodeBackupManifest(const BackupManifest& manifest);
// Refuses names that lead out of their directory.
Result<BackupManifest> DecodeBackupManifest(std::string_view bytes);

// Reads the generation that counts. kNotFound: there is none; kIo: it cannot be read; kCorrupt;
// kFailedPrecondition: a newer prefixd wrote it.
Result<BackupManifest> ReadBackup(const std::filesystem::path& dir);
// Makes the generation count.
Status WriteBackupManifest(const std::filesystem::path& dir, const BackupManifest& manifest);
std::filesystem::path BackupManifestPath(const std::filesystem::path& dir, uint64_t generation);

}  // namespace prefixd::storage
