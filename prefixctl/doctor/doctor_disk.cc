#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

#include "prefixctl/doctor/doctor.h"
#include "prefixctl/show/output.h"
#include "storage/files/min_free.h"
#include "storage/io/file.h"
#include "storage/io/io_engine.h"
#include "storage/segment/segment_layout.h"

namespace prefixd::ctl {
namespace fs = std::filesystem;
namespace {

constexpr uint64_t kLittleFree = 8ull << 30;

fs::path Nearest(const fs::path& dir) {
  std::error_code failed;
  fs::path at = fs::absolute(dir, failed);
  while (!fs::is_directory(at, failed) && at.has_parent_path() && at != at.parent_path()) {
    at = at.parent_path();
  }
  return at;
}

// A file without a name, so that nothing stays behind.
Result<storage::UniqueFd> ProbeFile(const fs::path& dir, fs::path* path) {
  std::string name = (dir / "prefixd-doctor-XXXXXX").string();
  storage::UniqueFd fd(::mkostemp(name.data(), O_CLOEXEC));
  if (!fd.valid()) {
    return Error{Code::kIo, "cannot write into " + dir.string() + ": " + std::strerror(errno)};
  }
  *path = name;
  return fd;
}

void ExamineReads(const fs::path& dir, std::vector<Finding>* out) {
  Finding uring{"io_uring", Level::kOk, "", ""}, direct{"O_DIRECT", Level::kOk, "", ""};
  fs::path path;
  auto probe = ProbeFile(dir, &path);
  if (!probe.ok()) {
    uring = {"io_uring", Level::kWarn, "not tried: " + probe.error().message,
             "run doctor as the user that runs prefixd"};
    direct = {"O_DIRECT", Level::kWarn, uring.found, uring.advice};
  } else {
    storage::AlignedBuffer page(storage::kPageBytes);
    std::memset(page.data(), 0x5a, page.size());
    const auto bytes = static_cast<ssize_t>(page.size());
    const bool written = ::pwrite(probe->get(), page.data(), page.size(), 0) == bytes;
    const auto opened = storage::OpenFile(path, O_RDWR | O_DIRECT);
    (void)::unlink(path.c_str());
    const bool is_direct = opened.ok() &&
                           ::pwrite(opened->get(), page.data(), page.size(), 0) == bytes &&
                           ::pread(opened->get(), page.data(), page.size(), 0) == bytes;
    direct.found = is_direct ? "writes and reads in " + dir.string()
                             : "the file system of " + dir.string() + " does not take it";
    if (!is_direct) {
      direct.level = Level::kWarn;
      direct.advice =
          "reads go through the page cache, which keeps rows twice; put the store on ext4 or XFS";
    }
    const auto engine = storage::NewEngine(storage::IoBackend::kUring, {},
                                           is_direct ? opened->get() : probe->get());
    if (!written) {
      uring = {"io_uring", Level::kFail, "cannot write a page into " + dir.string(),
               "make room on the disk"};
    } else if (engine.ok()) {
      uring.found = "opened, and read a page in " + dir.string();
    } else {
      uring.level = Level::kWarn;
      uring.found = engine.error().message;
      const std::string disabled = FirstLine("/proc/sys/kernel/io_uring_disabled");
      uring.advice =
          disabled.empty() || disabled == "0"
              ? "reads go through threads, which cost more; a container's seccomp profile often "
                "forbids io_uring: allow io_uring_setup, io_uring_enter and io_uring_register"
              : "reads go through threads, which cost more; set kernel.io_uring_disabled = 0";
    }
  }
  out->push_back(std::move(uring));
  out->push_back(std::move(direct));
}

struct Mount {
  std::string at, type, options;
};

// The fields of /proc/self/mountinfo: 5 is the mount point, 6 its options; behind "-" the type, the
// source, and the file system's own options.
Mount MountOf(const fs::path& dir) {
  std::error_code failed;
  const std::string real = fs::canonical(dir, failed).string();
  Mount best;
  std::ifstream in("/proc/self/mountinfo");
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    std::string skip, at, options, type, source, own;
    fields >> skip >> skip >> skip >> skip >> at >> options;
    while (fields >> skip && skip != "-") {
    }
    fields >> type >> source >> own;
    const bool holds = at == "/" || real == at || real.starts_with(at + "/");
    if (holds && at.size() >= best.at.size()) best = {at, type, options + "," + own};
  }
  return best;
}

Finding ExamineFileSystem(const fs::path& dir) {
  const Mount mount = MountOf(dir);
  Finding f{"file system", Level::kOk, mount.type + " at " + mount.at + " (" + mount.options + ")",
            ""};
  const std::string options = "," + mount.options + ",";
  const auto has = [&](const char* option) {
    return options.find("," + std::string(option) + ",") != std::string::npos;
  };
  if (mount.type.empty()) {
    f = {"file system", Level::kWarn, "unknown: /proc/self/mountinfo does not name it", ""};
  } else if (has("ro")) {
    f.level = Level::kFail;
    f.advice = "it is mounted read-only; look into the kernel's log for an error of the disk";
  } else if (mount.type == "tmpfs" || mount.type == "ramfs") {
    f.level = Level::kWarn;
    f.advice =
        "what is stored there is gone when the machine starts again; put the store on a disk";
  } else if (mount.type.starts_with("nfs") || mount.type == "cifs" || mount.type == "9p" ||
             mount.type.starts_with("fuse")) {
    f.level = Level::kWarn;
    f.advice = "locks and syncs of network file systems differ; put the store on a local disk";
  } else if (has("nobarrier") || has("barrier=0")) {
    f.level = Level::kWarn;
    f.advice = "without barriers a power cut loses what was acknowledged; mount with barriers";
  }
  return f;
}

Finding ExamineSpace(const fs::path& dir) {
  struct statvfs st {};
  if (::statvfs(dir.c_str(), &st) != 0) {
    return {"disk space", Level::kFail,
            "cannot look at " + dir.string() + ": " + std::strerror(errno), "check the path"};
  }
  const uint64_t free = uint64_t{st.f_bavail} * st.f_frsize;
  const uint64_t all = uint64_t{st.f_blocks} * st.f_frsize;
  Finding f{"disk space", Level::kOk, Bytes(free) + " of " + Bytes(all) + " free", ""};
  const uint64_t least = storage::MinFreeOf(all);
  if (free < least) {
    f.level = Level::kFail;
    f.advice = "puts are refused below " + Bytes(least) +
               ", unless store.min_free_mib says otherwise; make room";
  } else if (free < kLittleFree) {
    f.level = Level::kWarn;
    f.advice = "long prompts take gigabytes; prefixes will be evicted early";
  } else if (st.f_files > 0 && st.f_favail < 10'000) {
    f.level = Level::kWarn;
    f.advice =
        "only " + std::to_string(st.f_favail) + " inodes are free; a prefix takes some files";
  }
  return f;
}

Finding ExaminePermissions(const fs::path& dir) {
  Finding f{"directory", Level::kOk, "", ""};
  struct stat st {};
  // A store's directory as a whole may be a link; what lies in it may not.
  if (::stat(dir.c_str(), &st) != 0) {
    if (::lstat(dir.c_str(), &st) == 0) {
      return {"directory", Level::kFail, dir.string() + " is a symbolic link that leads nowhere",
              "make the directory that it names, or remove it"};
    }
    f.found = dir.string() + " does not exist";
    const fs::path above = Nearest(dir);
    if (::access(above.c_str(), W_OK) == 0) {
      f.found += "; prefixd makes it, for its user alone";
    } else {
      f.level = Level::kWarn;
      f.advice = "make it for the user that runs prefixd, mode 0700; this user cannot, in " +
                 above.string();
    }
    return f;
  }
  char mode[8];
  std::snprintf(mode, sizeof(mode), "%04o", static_cast<unsigned>(st.st_mode & 07777));
  f.found = dir.string() + ": mode " + mode + ", owner " + std::to_string(st.st_uid);
  if (!S_ISDIR(st.st_mode)) {
    f.level = Level::kFail;
    f.advice = "it is no directory; name one";
  } else if ((st.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    f.level = Level::kFail;
    f.advice =
        "others may write into it, and so replace what is served: chmod 0700 " + dir.string();
  } else if ((st.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    f.level = Level::kWarn;
    f.advice = "others may look into it, and it holds prompts: chmod 0700 " + dir.string();
  } else if (st.st_uid != ::geteuid()) {
    f.level = Level::kWarn;
    f.advice = "it belongs to another user than this one; run doctor as that user";
  }
  return f;
}

}  // namespace

std::vector<Finding> ExamineDisk(const fs::path& dir) {
  const fs::path at = Nearest(dir);
  std::vector<Finding> out;
  ExamineReads(at, &out);
  out.push_back(ExamineFileSystem(at));
  out.push_back(ExamineSpace(at));
  out.push_back(ExaminePermissions(dir));
  return out;
}

Finding ExamineSocket(const std::string& socket) {
  Finding f{"socket", Level::kOk, "", ""};
  struct stat st {};
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (socket.size() >= sizeof(address.sun_path)) {
    return {"socket", Level::kFail, socket + " is too long for a socket's path",
            "use a shorter listen.socket"};
  }
  if (::lstat(socket.c_str(), &st) != 0) {
    f.found = errno == EACCES ? "may not look at " + socket : "no daemon at " + socket;
    if (errno == EACCES) {
      f.level = Level::kWarn;
      f.advice = "add this user to the group of the directory (prefixd)";
    }
    return f;
  }
  std::memcpy(address.sun_path, socket.c_str(), socket.size() + 1);
  const storage::UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!S_ISSOCK(st.st_mode)) {
    return {"socket", Level::kFail, socket + " is no socket", "remove it, or name another"};
  }
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
    f.found = "a daemon answers at " + socket;
  } else if (errno == EACCES) {
    f = {"socket", Level::kWarn, "may not connect to " + socket,
         "listen.socket_access says who may; see docs/operations.md"};
  } else {
    f = {"socket", Level::kWarn, "nobody answers at " + socket + ": " + std::strerror(errno),
         "start prefixd; it replaces a socket that a dead one left"};
  }
  return f;
}

}  // namespace prefixd::ctl
