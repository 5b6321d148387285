#include "tests/reliability/disk/sim_disk.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iterator>

namespace prefixd::storage::reliability {
namespace fs = std::filesystem;
namespace {

SimDisk* aborting_disk = nullptr;  // the disk of this process

void OnAbort(int) { aborting_disk->Crash(SimDisk::kAborted); }

bool ChangesSomething(const Call& call) {
  switch (call.kind) {
    case CallKind::kOpen:
      return (call.flags & (O_CREAT | O_TRUNC)) != 0;
    case CallKind::kClose:
    case CallKind::kRead:
      return false;
    default:
      return true;
  }
}

bool MayFail(Fault fault, const Call& call) {
  const bool moves = call.kind == CallKind::kRead || call.kind == CallKind::kWrite;
  switch (fault) {
    case Fault::kNone:
      return false;
    case Fault::kEio:
      return call.kind != CallKind::kClose;
    case Fault::kEnospc:
      return call.kind != CallKind::kRead && call.kind != CallKind::kUnlink &&
             call.kind != CallKind::kSync && ChangesSomething(call);
    case Fault::kShort:
      return moves;
    case Fault::kEintr:
      return moves || call.kind == CallKind::kOpen || call.kind == CallKind::kAllocate;
    case Fault::kSyncError:
      return call.kind == CallKind::kSync;
  }
  return false;
}

// Reads or writes only a beginning of the caller's bytes.
long MoveHalf(const Call& call) {
  const iovec& piece = call.iov.front();
  const size_t n = std::max<size_t>(1, piece.iov_len / 2);
  const long at = static_cast<long>(call.offset);
  if (call.kind == CallKind::kRead) {
    return call.at_position ? ::syscall(SYS_read, call.fd, piece.iov_base, n)
                            : ::syscall(SYS_pread64, call.fd, piece.iov_base, n, at);
  }
  return call.at_position ? ::syscall(SYS_write, call.fd, piece.iov_base, n)
                          : ::syscall(SYS_pwrite64, call.fd, piece.iov_base, n, at);
}

long Fail(int error) {
  errno = error;
  return -1;
}

}  // namespace

const char* FaultName(Fault fault) {
  switch (fault) {
    case Fault::kNone:
      return "none";
    case Fault::kEio:
      return "EIO";
    case Fault::kEnospc:
      return "ENOSPC";
    case Fault::kShort:
      return "short";
    case Fault::kEintr:
      return "EINTR";
    case Fault::kSyncError:
      return "sync error";
  }
  return "?";
}

SimDisk::SimDisk(DiskPlan plan) : plan_(std::move(plan)), rng_(plan_.seed) {}

void SimDisk::Start() {
  Load();
  aborting_disk = this;
  std::signal(SIGABRT, OnAbort);
  Watch(plan_.root, this);
}

void SimDisk::Load() {
  disk_.directories.insert(plan_.root.string());
  for (const auto& entry : fs::recursive_directory_iterator(plan_.root)) {
    const std::string path = entry.path().string();
    if (entry.is_directory()) {
      disk_.directories.insert(path);
      continue;
    }
    auto file = std::make_shared<SimFile>();
    std::ifstream in(path, std::ios::binary);
    file->durable.assign(std::istreambuf_iterator<char>(in), {});
    disk_.files[path] = disk_.now_files[path] = std::move(file);
  }
}

void SimDisk::Crash(int exit_code) {
  const std::lock_guard lock(mutex_);
  WriteImage(disk_, plan_.root.string(), plan_.image.string(), rng_);
  std::_Exit(exit_code);
}

long SimDisk::Run(const Call& call, const std::function<long()>& real) {
  const bool now = [&] {
    const std::lock_guard lock(mutex_);
    return ChangesSomething(call) && ++changes_ == plan_.crash_at;
  }();
  // A sync that the crash interrupts has promised nothing; another call is under way.
  if (now && call.kind == CallKind::kSync) Crash(kCrashed);
  long result;
  int error;
  {
    const std::lock_guard lock(mutex_);
    errno = 0;
    result = RunLocked(call, real);
    error = errno;
  }
  if (now) Crash(kCrashed);
  if (result < 0) errno = error;
  return result;
}

bool SimDisk::Hit(const Call& call) {
  if (!MayFail(plan_.fault, call)) return false;
  const uint64_t n = ++eligible_;
  if (plan_.fault_at == 0 || n < plan_.fault_at) return false;
  const uint64_t last = !plan_.fault_stays             ? plan_.fault_at
                        : plan_.fault == Fault::kEintr ? plan_.fault_at + 2
                                                       : UINT64_MAX;
  return n <= last;
}

long SimDisk::RunLocked(const Call& call, const std::function<long()>& real) {
  if (Hit(call)) {
    ++injected_;
    return Spoil(call);
  }
  switch (call.kind) {
    case CallKind::kOpen:
      return Opened(call, real);
    case CallKind::kClose:
      paths_.erase(call.fd);
      files_.erase(call.fd);
      return real();
    case CallKind::kRead:
      return real();
    case CallKind::kSync:
      if (!LiesAbout(paths_[call.fd])) Sync(call.fd);
      return 0;  // the real disk need not sync
    case CallKind::kAllocate:
      // Blocks reserved beyond the file's end show in no crash.
      if ((call.flags & FALLOC_FL_KEEP_SIZE) != 0) return 0;
      break;
    case CallKind::kSharedMap:
      std::fprintf(stderr, "%s is mapped for writing, past the model\n", paths_[call.fd].c_str());
      std::_Exit(79);
    default:
      break;
  }
  // A renamed file is looked up before its name is gone.
  const long result = real();
  if (result >= 0) Record(call, result);
  return result;
}

long SimDisk::Spoil(const Call& call) {
  switch (plan_.fault) {
    case Fault::kEnospc:
      return Fail(ENOSPC);
    case Fault::kEintr:
      return Fail(EINTR);
    case Fault::kShort: {
      const long n = MoveHalf(call);
      if (n > 0 && call.kind == CallKind::kWrite) Record(call, n);
      return n;
    }
    default:
      break;
  }
  // After a failed sync the kernel forgets what was dirty: a later sync succeeds without it.
  if (call.kind == CallKind::kSync) {
    if (const auto file = files_.find(call.fd); file != files_.end()) file->second->pending.clear();
  }
  return Fail(EIO);
}

long SimDisk::Opened(const Call& call, const std::function<long()>& real) {
  const bool known = disk_.now_files.contains(call.path);
  const long fd = real();
  if (fd < 0) return fd;
  paths_[static_cast<int>(fd)] = call.path;
  if ((call.flags & O_DIRECTORY) != 0 || (!known && (call.flags & O_CREAT) == 0)) return fd;
  if (!known) {
    disk_.Change({NameChange::Kind::kFile, call.path, "", std::make_shared<SimFile>()});
  }
  const auto& file = disk_.now_files.at(call.path);
  if (known && (call.flags & O_TRUNC) != 0) file->pending.push_back({true, 0, ""});
  files_[static_cast<int>(fd)] = file;
  return fd;
}

void SimDisk::Record(const Call& call, long result) {
  switch (call.kind) {
    case CallKind::kWrite: {
      FileChange change{false, call.offset, ""};
      auto left = static_cast<size_t>(result);
      for (const iovec& piece : call.iov) {
        const size_t n = std::min(left, piece.iov_len);
        change.bytes.append(static_cast<const char*>(piece.iov_base), n);
        left -= n;
      }
      files_.at(call.fd)->pending.push_back(std::move(change));
      return;
    }
    case CallKind::kTruncate:
      files_.at(call.fd)->pending.push_back({true, call.offset, ""});
      return;
    case CallKind::kAllocate: {
      // The call grows the file and never shrinks it, like an empty write at its end.
      const auto& file = files_.at(call.fd);
      SimFile grown = *file;
      grown.Recluster();
      if (grown.durable.size() < call.offset) file->pending.push_back({true, call.offset, ""});
      return;
    }
    case CallKind::kRename:
    case CallKind::kLink: {
      const auto from = disk_.now_files.find(call.path);
      if (from == disk_.now_files.end()) return;
      const auto kind =
          call.kind == CallKind::kRename ? NameChange::Kind::kRename : NameChange::Kind::kFile;
      const std::string& name = call.kind == CallKind::kRename ? call.path : call.to;
      disk_.Change({kind, name, call.to, from->second});
      return;
    }
    case CallKind::kUnlink:
    case CallKind::kRmdir:
      disk_.Change({NameChange::Kind::kRemove, call.path, "", nullptr});
      return;
    case CallKind::kMkdir:
      disk_.Change({NameChange::Kind::kMakeDirectory, call.path, "", nullptr});
      return;
    default:
      return;
  }
}

void SimDisk::Sync(int fd) {
  if (const auto file = files_.find(fd); file != files_.end()) {
    file->second->Recluster();
  } else {
    disk_.Recluster(paths_[fd]);
  }
}

bool SimDisk::LiesAbout(const std::string& path) const {
  switch (plan_.lie) {
    case Lie::kNone:
      return false;
    case Lie::kSegmentSync:
      return path.ends_with(".seg");
    case Lie::kBlobSync:  // blobs are written under names of their own and renamed
      return path.ends_with(".tmp") && path.find(".blob.") != std::string::npos;
    case Lie::kDirectorySync:
      return path.ends_with("/segments");
  }
  return false;
}

}  // namespace prefixd::storage::reliability
