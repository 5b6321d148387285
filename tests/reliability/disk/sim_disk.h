// Simulates a disk that keeps only synced data. It intercepts the system calls on one directory
// (they are carried out as well, so that the program sees a working file system) and remembers of
// every file what is durable and what was written since, and of every directory which creations,
// renames and removals were not synced. At a chosen call the disk crashes: the image directory gets
// the durable data and the part of the rest that survives by chance; the process ends at once.
//
// It is harsher than file systems are: unsynced writes survive in any combination, torn or
// corrupted, and a file's name is durable only once its directory was synced.
//
// Thread-safety: as IoHook. Calls are carried out one at a time.
#pragma once

#include <atomic>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "tests/reliability/disk/image.h"
#include "tests/reliability/shim/io_hook.h"

namespace prefixd::storage::reliability {

enum class Fault : uint8_t { kNone, kEio, kEnospc, kShort, kEintr, kSyncError };
inline constexpr Fault kFaults[] = {Fault::kEio, Fault::kEnospc, Fault::kShort, Fault::kEintr,
                                    Fault::kSyncError};
const char* FaultName(Fault fault);

// A Lie is the kind of file that a lying disk reports as synced although it is not.
enum class Lie : uint8_t { kNone, kSegmentSync, kBlobSync, kDirectorySync };

struct DiskPlan {
  std::filesystem::path root;   // watched; files already there are durable
  std::filesystem::path image;  // where the crash leaves its image; must not exist
  uint64_t seed = 0;
  uint64_t crash_at = 0;  // crash at the n-th call that changes something; 0: never by itself
  Lie lie = Lie::kNone;
  Fault fault = Fault::kNone;
  uint64_t fault_at = 0;     // the fault happens at the n-th call that it can befall
  bool fault_stays = false;  // and all later ones (EINTR: the two next ones, since callers retry)
};

class SimDisk final : public IoHook {
 public:
  // These are exit codes of a process whose disk crashed: as planned, and by abort() (an
  // assertion).
  static constexpr int kCrashed = 77, kAborted = 78;

  explicit SimDisk(DiskPlan plan);
  // Begins to watch; once in the life of a process. abort() from now on is a crash of the disk.
  void Start();
  // Writes the image and ends the process.
  [[noreturn]] void Crash(int exit_code);

  long Run(const Call& call, const std::function<long()>& real) override;

  uint64_t faulty_calls() const { return eligible_; }  // calls that the planned fault could befall
  uint64_t injected() const { return injected_; }

 private:
  void Load();
  long RunLocked(const Call& call, const std::function<long()>& real);
  // Returns whether this call fails; Spoil decides how.
  bool Hit(const Call& call);
  long Spoil(const Call& call);
  long Opened(const Call& call, const std::function<long()>& real);
  void Record(const Call& call, long result);
  void Sync(int fd);
  bool LiesAbout(const std::string& path) const;

  const DiskPlan plan_;
  std::mutex mutex_;
  std::mt19937_64 rng_;
  DiskState disk_;
  std::map<int, std::string> paths_;               // [descriptor], open ones
  std::map<int, std::shared_ptr<SimFile>> files_;  // [descriptor], open files
  uint64_t changes_ = 0;
  std::atomic<uint64_t> eligible_{0}, injected_{0};
};

}  // namespace prefixd::storage::reliability
