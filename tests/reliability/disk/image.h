// Holds the state of a simulated disk: files with their durable bytes and unsynced changes, names
// with their unsynced changes; and decides which of it survives a crash.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace prefixd::storage::reliability {

struct FileChange {
  bool resize = false;
  uint64_t offset = 0;  // resize: the new size
  std::string bytes;
};

struct SimFile {
  std::string durable;
  std::vector<FileChange> pending;  // in order

  void Recluster();  // a sync: everything pending becomes durable
};

struct NameChange {
  enum class Kind : uint8_t { kFile, kRename, kRemove, kMakeDirectory };
  Kind kind;
  std::string path, to;
  std::shared_ptr<SimFile> file;  // for kFile and kRename
};

struct DiskState {
  std::map<std::string, std::shared_ptr<SimFile>> files;      // durable names
  std::set<std::string> directories;                          // durable names
  std::vector<NameChange> pending;                            // in order, all directories
  std::map<std::string, std::shared_ptr<SimFile>> now_files;  // names as the program sees them

  void Change(NameChange change);
  // Applies a sync of the directory: the changes to names in it become durable.
  void Recluster(const std::string& directory);
};

// Writes to `image` the part of the state (paths below `root`) that survives by chance. Bypasses
// the hook.
void WriteImage(const DiskState& state, const std::string& root, const std::string& image,
                std::mt19937_64& rng);

}  // namespace prefixd::storage::reliability
