// Makes real power cuts: an ext4 file system on a loop device is shut down under load
// (EXT4_IOC_SHUTDOWN), with its journal flushed or not; it is unmounted, mounted anew, and the
// store on it is checked. io_uring and O_DIRECT work as in service.
#include <fcntl.h>
#include <linux/loop.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "storage/io/file.h"
#include "tests/reliability/harness/harness.h"
#include "tests/reliability/harness/report.h"
#include "tests/reliability/workload/workload.h"

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

// mkfs.ext4 (Debian package e2fsprogs) is not on every user's path.
Status MakeFileSystem(const std::string& device) {
  const std::string command =
      "PATH=$PATH:/sbin:/usr/sbin mkfs.ext4 -q -F -E lazy_itable_init=0 -J size=4 " + device +
      " >/dev/null 2>&1";
  if (std::system(command.c_str()) != 0) return Error{Code::kUnavailable, "mkfs.ext4 failed"};
  return {};
}

// Mounts are made in a namespace of this worker's own, so that the kernel takes mounts and loop
// devices back whatever happens to the process.
Status OwnMounts() {
  if (::unshare(CLONE_NEWNS) != 0) return Failed("unshare");
  if (::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0) return Failed("mount /");
  return {};
}

constexpr int kCutsPerDisk = 5;

// Makes several cuts of one store on one file system.
Status CutPower(const fs::path& scratch, uint64_t seed, int cuts, Journal& report) {
  PREFIXD_TRY(OwnMounts());
  PREFIXD_ASSIGN(const auto loop, LoopDevice::Attach(scratch / "disk"));
  PREFIXD_TRY(MakeFileSystem(loop->path()));
  const fs::path at = scratch / "mounted", errors = scratch / "errors", dir = at / "store";
  std::mt19937_64 rng(seed);
  Truth truth;
  Journal journal;
  for (int cut = 0; cut < cuts; ++cut) {
    PREFIXD_ASSIGN(auto mounted, Mounted::Mount(loop->path(), at));
    WorkloadPlan plan{.dir = dir, .seed = rng(), .errors_are_fine = true};
    plan.io = rng() % 2 ? IoBackend::kThreads : IoBackend::kAuto;
    Child child(
        [&] {
          Workload workload(plan, truth, journal);
          if (workload.Open()) workload.Run();
          return 1;
        },
        errors);
    (void)child.WaitFor(std::chrono::microseconds(rng() % 400'000));
    // The system call takes a while, and an fdatasync that it overtakes may succeed although
    // nothing is written any more. In a real cut no process is left to see that.
    journal.Cut();
    PREFIXD_TRY(mounted->Shutdown(rng() % 2 ? kFlushLog : kNoFlushLog));
    child.Kill();
    (void)child.Wait();
    Absorb(journal, truth, report, Where("power", "before cut " + std::to_string(cut)));
    mounted.reset();
    PREFIXD_ASSIGN(mounted, Mounted::Mount(loop->path(), at));
    CheckInChild("power", dir, truth, journal, report, errors);
    report.Count(1, "power cuts");
  }
  return {};
}

}  // namespace

Prepared PreparePower(bool) {
  const auto cycle = [](uint64_t, uint64_t seed, Journal& report) {
    const Scratch scratch(/*on_device=*/true);
    // The child process alone has the mounts.
    const ChildEnd end = RunChild([&] {
      Status cut = CutPower(scratch.path(), seed, kCutsPerDisk, report);
      if (!cut.ok()) report.Violation(Where("power", cut.error().ToString()));
      return 0;
    });
    if (!end.exited) report.Violation(Where("power", end.Describe()));
  };
  // One cut shows whether this machine allows it.
  const Scratch scratch(/*on_device=*/true);
  Journal report;
  std::string why;
  RunChild([&] {
    Status cut = CutPower(scratch.path(), 1, 1, report);
    if (!cut.ok()) report.AppendText(EventKind::kPoint, cut.error().message);
    return 0;
  });
  for (const Event& event : report.Take()) {
    if (event.kind == EventKind::kPoint) why = event.Text();
  }
  if (!why.empty()) {
    return {.skipped = "power cuts need root, loop devices and ext4; here: " + why};
  }
  return {.cycle = cycle};
}

}  // namespace prefixd::storage::reliability
