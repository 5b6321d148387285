// A file system of its own that can lose its power: ext4 on a loop device, shut down under whoever
// uses it (EXT4_IOC_SHUTDOWN). Needs root, loop devices and mkfs.ext4. io_uring and O_DIRECT work
// as in service.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>

#include "prefixd/result.h"

namespace prefixd::storage::reliability {

// Mounts are made in a namespace of the calling process's own, so that the kernel takes mounts and
// loop devices back whatever happens to the process.
Status OwnMounts();

class LoopDevice;
class Mounted;

class CutDisk {
 public:
  // Makes an empty file system in a file in `scratch`; it is mounted there, too. kIo or
  // kUnavailable, with what this machine lacks.
  static Result<std::unique_ptr<CutDisk>> Make(const std::filesystem::path& scratch);
  ~CutDisk();
  CutDisk(const CutDisk&) = delete;
  CutDisk& operator=(const CutDisk&) = delete;

  // Where files lie while it is mounted.
  const std::filesystem::path& path() const { return at_; }
  Status Mount();
  // Cuts the power, the journal flushed or not; what is called from now on fails. It stays mounted.
  Status Cut(bool flush_journal);
  // Waits until nobody uses it any more.
  void Unmount();

 private:
  explicit CutDisk(std::filesystem::path at);

  const std::filesystem::path at_;
  std::unique_ptr<LoopDevice> loop_;
  std::unique_ptr<Mounted> mounted_;
};

}  // namespace prefixd::storage::reliability
