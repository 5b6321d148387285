// Keeps a file that takes up space and is released when the disk is full, so that the catalog can
// still commit a removal, which frees more. RocksDB must never meet a full disk in the middle of a
// write.
//
// Thread-safety: all methods may be called concurrently.
#pragma once

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <mutex>

#include "prefixd/result.h"

namespace prefixd::storage {

class Ballast {
 public:
  // Notes what lies at `path` (the file of an earlier run) and creates nothing. 0 bytes: no
  // ballast.
  Ballast(std::filesystem::path path, uint64_t bytes);

  // Releases the ballast if the catalog could otherwise run out of space. kResourceExhausted when
  // the disk is so full that not even that helps; kIo on a read-only file system: nothing should be
  // written to the catalog then, because it takes no more writes after one that failed.
  Status MakeRoom();
  // Creates the ballast (again) if `keep_free` bytes stay free beside it.
  void Restore(uint64_t keep_free);

  // Returns the bytes that Restore would still have to take.
  uint64_t missing_bytes() const { return held_ ? 0 : bytes_; }

 private:
  const std::filesystem::path path_;
  const uint64_t bytes_;
  std::mutex mutex_;
  std::atomic<bool> held_{false};
};

}  // namespace prefixd::storage
