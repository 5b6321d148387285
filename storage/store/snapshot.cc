#include "storage/store/snapshot.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>
#include <vector>

#include "base/call_scope.h"
#include "storage/catalog/missing_files.h"
#include "storage/catalog/store_dir.h"
#include "storage/io/crash_point.h"
#include "storage/io/errors.h"
#include "storage/io/file.h"

namespace prefixd::storage {
namespace fs = std::filesystem;
namespace {

constexpr const char* kDirectory = "snapshot";

class StoreSnapshot final : public Snapshot {
 public:
  explicit StoreSnapshot(std::shared_ptr<StoreCore> core)
      : core_(std::move(core)), dir_(core_->options.dir / kDirectory) {}
  ~StoreSnapshot() override {
    if (Status removed = RemoveOldSnapshot(core_->options.dir); !removed.ok()) {
      LogWarning(removed.error().message);
    }
    core_->snapshot_taken = false;
  }
  const fs::path& dir() const override { return dir_; }

 private:
  const std::shared_ptr<StoreCore> core_;
  const fs::path dir_;
};

// False: the file is gone.
Result<bool> LinkFile(const fs::path& from, const fs::path& to) {
  if (::link(from.c_str(), to.c_str()) == 0) return true;
  if (errno == ENOENT) return false;
  return ErrnoError(errno, "cannot link " + from.string() + " for a snapshot");
}

Status LinkBlobs(const StoreCore& core, const SegmentId& id, const fs::path& to) {
  for (const std::string& name : core.blobs->List(id)) {
    PREFIXD_ASSIGN(const bool linked,
                   LinkFile(BlobPath(core.options.dir, id, name), BlobPath(to, id, name)));
    (void)linked;  // replaced or removed at this moment: it is made again
  }
  return {};
}

}  // namespace

Status RemoveOldSnapshot(const fs::path& store_dir) {
  std::error_code failed;
  fs::remove_all(store_dir / kDirectory, failed);
  if (failed) {
    return ErrnoError(failed.value(), "cannot remove " + (store_dir / kDirectory).string());
  }
  return {};
}

Result<std::unique_ptr<Snapshot>> TakeSnapshot(const std::shared_ptr<StoreCore>& core) {
  if (core->snapshot_taken.exchange(true)) {
    return Error{Code::kFailedPrecondition,
                 "there is a snapshot of this store; end the backup that uses it first"};
  }
  auto snapshot = std::make_unique<StoreSnapshot>(core);
  PREFIXD_TRY(RemoveOldSnapshot(core->options.dir));
  const fs::path& to = snapshot->dir();
  for (const fs::path& dir : {to, to / "segments"}) {
    if (::mkdir(dir.c_str(), 0700) != 0) {
      return ErrnoError(errno, "cannot create the directory " + dir.string());
    }
  }
  CrashPoint("snapshot.begun");
  std::vector<SegmentRecord> records;
  std::vector<std::string> missing;
  {
    std::lock_guard commit(core->commit_mutex);
    PREFIXD_TRY(core->catalog->CopyTo(to / "catalog"));
    records = core->tree.Records();
    for (const SegmentRecord& record : records) {
      PREFIXD_ASSIGN(const bool linked, LinkFile(SegmentPath(core->options.dir, record.file),
                                                 SegmentPath(to, record.file)));
      if (linked) continue;
      LogWarning("snapshot: the file of segment " + record.id.ToString() + " is gone");
      missing.push_back(
          fs::relative(SegmentPath(core->options.dir, record.file), core->options.dir).string());
    }
  }
  PREFIXD_TRY(WriteMissingFiles(to, missing));
  CrashPoint("snapshot.linked");
  for (const SegmentRecord& record : records) {
    PREFIXD_TRY(CheckCall());
    PREFIXD_TRY(LinkBlobs(*core, record.id, to));
  }
  PREFIXD_TRY(WriteIdentityFile(to, core->identity));
  return std::unique_ptr<Snapshot>(std::move(snapshot));
}

}  // namespace prefixd::storage
