#include "tests/reliability/disk/cut_disk.h"

#include <fcntl.h>
#include <linux/loop.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "storage/io/file.h"

namespace prefixd::storage::reliability {
namespace fs = std::filesystem;
namespace {

constexpr uint64_t kDiskBytes = 96ull << 20;
// Kernel headers do not install <linux/ext4.h>.
constexpr unsigned long kExt4Shutdown = _IOR('X', 125, uint32_t);
constexpr uint32_t kFlushLog = 1, kNoFlushLog = 2;

Error Failed(const char* what) {
  return {Code::kIo, std::string(what) + ": " + std::strerror(errno)};
}

// mkfs.ext4 (Debian package e2fsprogs) is not on every user's path.
Status MakeFileSystem(const std::string& device) {
  const std::string command =
      "PATH=$PATH:/sbin:/usr/sbin mkfs.ext4 -q -F -E lazy_itable_init=0 -J size=4 " + device +
      " >/dev/null 2>&1";
  if (std::system(command.c_str()) != 0) return Error{Code::kUnavailable, "mkfs.ext4 failed"};
  return {};
}

}  // namespace

// A LoopDevice is a file on a loop device; both go with the last user of the device.
class LoopDevice {
 public:
  static Result<std::unique_ptr<LoopDevice>> Attach(const fs::path& file) {
    std::unique_ptr<LoopDevice> loop(new LoopDevice());
    UniqueFd disk(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    if (!disk.valid() || ::ftruncate(disk.get(), kDiskBytes) != 0) return Failed("disk file");
    const UniqueFd control(::open("/dev/loop-control", O_RDWR | O_CLOEXEC));
    if (!control.valid()) return Failed("/dev/loop-control");
    // Another process may take the free one first.
    for (int attempt = 0; attempt < 50; ++attempt) {
      const int n = ::ioctl(control.get(), LOOP_CTL_GET_FREE);
      if (n < 0) return Failed("no free loop device");
      loop->path_ = "/dev/loop" + std::to_string(n);
      loop->fd_ = UniqueFd(::open(loop->path_.c_str(), O_RDWR | O_CLOEXEC));
      if (!loop->fd_.valid()) return Failed(loop->path_.c_str());
      loop_config config{};
      config.fd = static_cast<uint32_t>(disk.get());
      config.info.lo_flags = LO_FLAGS_AUTOCLEAR;
      if (::ioctl(loop->fd_.get(), LOOP_CONFIGURE, &config) == 0) return loop;
      if (errno != EBUSY) return Failed("LOOP_CONFIGURE");
    }
    return Failed("no loop device could be taken");
  }
  const std::string& path() const { return path_; }

 private:
  LoopDevice() = default;
  std::string path_;
  UniqueFd fd_;
};

class Mounted {
 public:
  static Result<std::unique_ptr<Mounted>> Mount(const std::string& device, const fs::path& at) {
    fs::create_directories(at);
    if (::mount(device.c_str(), at.c_str(), "ext4", 0, nullptr) != 0) return Failed("mount");
    return std::unique_ptr<Mounted>(new Mounted(at));
  }
  ~Mounted() {
    // Operations that a killed process had in flight may keep the file system busy for a moment;
    // detached too early, the next mount would find the old one, shut down.
    for (int attempt = 0; ::umount(at_.c_str()) != 0; ++attempt) {
      if (errno != EBUSY || attempt == 500) {
        ::umount2(at_.c_str(), MNT_DETACH);
        return;
      }
      ::usleep(10'000);
    }
  }
  Status Shutdown(uint32_t how) {
    const UniqueFd root(::open(at_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!root.valid() || ::ioctl(root.get(), kExt4Shutdown, &how) != 0) {
      return Failed("EXT4_IOC_SHUTDOWN");
    }
    return {};
  }

 private:
  explicit Mounted(fs::path at) : at_(std::move(at)) {}
  const fs::path at_;
};

Status OwnMounts() {
  if (::unshare(CLONE_NEWNS) != 0) return Failed("unshare");
  if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return Failed("mount /");
  return {};
}

CutDisk::CutDisk(fs::path at) : at_(std::move(at)) {}
CutDisk::~CutDisk() = default;

Result<std::unique_ptr<CutDisk>> CutDisk::Make(const fs::path& scratch) {
  std::unique_ptr<CutDisk> disk(new CutDisk(scratch / "mounted"));
  PREFIXD_ASSIGN(disk->loop_, LoopDevice::Attach(scratch / "disk"));
  PREFIXD_TRY(MakeFileSystem(disk->loop_->path()));
  return disk;
}

Status CutDisk::Mount() {
  PREFIXD_ASSIGN(mounted_, Mounted::Mount(loop_->path(), at_));
  return {};
}

Status CutDisk::Cut(bool flush_journal) {
  return mounted_->Shutdown(flush_journal ? kFlushLog : kNoFlushLog);
}

void CutDisk::Unmount() { mounted_.reset(); }

}  // namespace prefixd::storage::reliability
