#include "measure/timing/machine.h"

#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>

#include "measure/timing/run_facts.h"

namespace prefixd::bench {
namespace {

namespace fs = std::filesystem;

std::string FirstLine(const fs::path& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

std::string Gigabytes(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f GB", bytes / 1e9);
  return text;
}

std::string FileSystemName(long type) {
  switch (static_cast<unsigned long>(type)) {
    case EXT4_SUPER_MAGIC:
      return "ext4";
    case XFS_SUPER_MAGIC:
      return "xfs";
    case BTRFS_SUPER_MAGIC:
      return "btrfs";
    case TMPFS_MAGIC:
      return "tmpfs (memory)";
    case OVERLAYFS_SUPER_MAGIC:
      return "overlayfs";
    case 0x2fc12fc1:
      return "zfs";
    case NFS_SUPER_MAGIC:
      return "nfs";
    default:
      return "another file system";
  }
}

// Returns what the kernel says of the block device below `dir`: model and kind, where it says any.
std::string DeviceOf(const fs::path& dir) {
  struct stat s {};
  if (::stat(dir.c_str(), &s) != 0) return "";
  fs::path block =
      "/sys/dev/block/" + std::to_string(major(s.st_dev)) + ":" + std::to_string(minor(s.st_dev));
  std::error_code ec;
  block = fs::canonical(block, ec);
  if (ec) return "";
  if (!fs::exists(block / "queue", ec)) block = block.parent_path();  // a partition
  std::string out = block.filename().string();
  const std::string model = FirstLine(block / "device/model");
  if (!model.empty()) out += " " + model;
  const std::string rotates = FirstLine(block / "queue/rotational");
  if (rotates == "1") out += ", a disk that reports that it rotates";
  return out;
}

}  // namespace

double LoadPerCore() {
  double load = 0;
  if (::getloadavg(&load, 1) != 1) return 0;
  return load / std::max(1u, std::thread::hardware_concurrency());
}

std::vector<std::pair<std::string, std::string>> MachineFacts(const fs::path& dir) {
  std::vector<std::pair<std::string, std::string>> facts;
  std::string machine, date, commit;
  for (const auto& [name, value] : RunFacts()) {
    if (name == "machine") machine = value;
    if (name == "date") date = value;
    if (name == "commit") commit = value;
  }
  facts.emplace_back("processor", machine);
  const double pages = double(::sysconf(_SC_PHYS_PAGES)) * double(::sysconf(_SC_PAGESIZE));
  facts.emplace_back("memory", Gigabytes(pages));
  struct statfs s {};
  if (::statfs(dir.c_str(), &s) == 0) {
    const std::string device = DeviceOf(dir);
    facts.emplace_back("disk", (device.empty() ? "" : device + ", ") + FileSystemName(s.f_type) +
                                   ", " + Gigabytes(double(s.f_bavail) * double(s.f_bsize)) +
                                   " free");
  }
  utsname kernel{};
  if (::uname(&kernel) == 0) facts.emplace_back("kernel", kernel.release);
  char load[64];
  std::snprintf(load, sizeof load, "%.1f processes per core in the minute before", LoadPerCore());
  facts.emplace_back("load at the start", load);
  facts.emplace_back("date", date);
  facts.emplace_back("prefixd", commit);
  return facts;
}

}  // namespace prefixd::bench
