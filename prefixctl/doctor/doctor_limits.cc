#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <optional>
#include <sstream>

#include "base/descriptor_limit.h"
#include "prefixctl/doctor/doctor.h"
#include "prefixctl/show/output.h"
#include "storage/io/file.h"

namespace prefixd::ctl {
namespace {

std::string LimitText(rlim_t limit) {
  return limit == RLIM_INFINITY ? "unlimited" : std::to_string(limit);
}

Finding ExamineDescriptors() {
  constexpr rlim_t kLittle = 4096;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  Finding f{"open files", Level::kOk,
            LimitText(limit.rlim_cur) + " (up to " + LimitText(limit.rlim_max) + ")", ""};
  if (limit.rlim_max < kLeastDescriptors) {
    f.level = Level::kFail;
    f.advice = "prefixd does not start with fewer than " + std::to_string(kLeastDescriptors) +
               "; set LimitNOFILE=65536, or ulimit -n";
  } else if (limit.rlim_max < kLittle) {
    f.level = Level::kWarn;
    f.advice = "few connections and segments can be open; set LimitNOFILE=65536, or ulimit -n";
  }
  return f;
}

Finding ExamineLockedMemory() {
  constexpr rlim_t kLittle = 64ull << 20;
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  const bool all = limit.rlim_max == RLIM_INFINITY;
  Finding f{"locked memory", Level::kOk, all ? "unlimited" : Bytes(limit.rlim_max), ""};
  if (!all && limit.rlim_max < kLittle) {
    f.level = Level::kWarn;
    f.advice =
        "store.host_tier_mlock, and io_uring before Linux 5.12, need more: LimitMEMLOCK=infinity";
  }
  return f;
}

uint64_t MemInfo(const std::string& field) {
  std::ifstream in("/proc/meminfo");
  for (std::string line; std::getline(in, line);) {
    std::istringstream fields(line);
    std::string name;
    uint64_t value = 0;
    if (fields >> name >> value && name == field + ":") return value;
  }
  return 0;
}

Finding ExamineHugePages() {
  const std::string modes = FirstLine("/sys/kernel/mm/transparent_hugepage/enabled");
  const uint64_t pool = MemInfo("HugePages_Total");
  const size_t from = modes.find('['), to = modes.find(']');
  const bool known = from != std::string::npos && to != std::string::npos && from < to;
  const std::string mode = known ? modes.substr(from + 1, to - from - 1) : "unknown";
  Finding f{"huge pages", Level::kOk, "transparent: " + mode + "; pool of " + std::to_string(pool),
            ""};
  if (mode == "never" && pool == 0) {
    f.level = Level::kWarn;
    f.advice =
        "reading rows in memory is slower; echo madvise > "
        "/sys/kernel/mm/transparent_hugepage/enabled";
  }
  return f;
}

Finding ExamineSharedMemory() {
  constexpr size_t kBytes = 1 << 20;
  const storage::UniqueFd fd(::memfd_create("prefixd-doctor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  void* at = MAP_FAILED;
  if (fd.valid() && ::ftruncate(fd.get(), kBytes) == 0) {
    at = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  }
  if (at == MAP_FAILED) {
    return {"shared memory", Level::kFail, std::string("memfd: ") + std::strerror(errno),
            "clients on this machine pass tensors through it; allow memfd_create"};
  }
  std::memset(at, 1, kBytes);
  ::munmap(at, kBytes);
  Finding f{"shared memory", Level::kOk, "memfd works", ""};
  struct statvfs st {};
  if (::statvfs("/dev/shm", &st) == 0) {
    f.found += "; /dev/shm has " + Bytes(uint64_t{st.f_blocks} * st.f_frsize) + " (not used)";
  }
  return f;
}

// Returns the least value of a limit on the way up from this process's control group (version 2);
// absent: none is set.
std::optional<uint64_t> GroupLimit(const char* file, uint64_t (*parse)(const std::string&)) {
  std::ifstream in("/proc/self/cgroup");
  std::filesystem::path group;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("0::")) group = "/sys/fs/cgroup" + line.substr(3);
  }
  std::optional<uint64_t> least;
  while (!group.empty() && group != "/sys/fs" && group != group.parent_path()) {
    const std::string line = FirstLine(group / file);
    if (!line.empty() && !line.starts_with("max")) {
      const uint64_t value = parse(line);
      least = std::min(least.value_or(value), value);
    }
    group = group.parent_path();
  }
  return least;
}

uint64_t Whole(const std::string& text) {
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

// "quota period", in microseconds, as thousandths of a core.
uint64_t CoreShare(const std::string& text) {
  std::istringstream in(text);
  uint64_t quota = 0, period = 0;
  return in >> quota >> period && period > 0 ? quota * 1000 / period : 0;
}

Finding ExamineGroups() {
  constexpr uint64_t kLittle = 1ull << 30;
  const auto memory = GroupLimit("memory.max", Whole);
  const auto cores = GroupLimit("cpu.max", CoreShare);
  char share[32] = "all cores";
  if (cores) std::snprintf(share, sizeof(share), "%.1f cores", double(*cores) / 1000);
  const uint64_t installed = MemInfo("MemTotal") * 1024;
  Finding f{"control group", Level::kOk,
            (memory ? Bytes(*memory) : "all " + Bytes(installed)) + " of memory, " + share, ""};
  if (memory && *memory < kLittle) {
    f.level = Level::kWarn;
    f.advice = "the catalog, a put and a host tier need more than " + Bytes(kLittle) +
               "; raise memory.max, and set store.memory_mib below it";
  } else if (cores && *cores < 1000) {
    f.level = Level::kWarn;
    f.advice = "steps wait for the rest of each period; raise cpu.max to a core at least";
  }
  return f;
}

}  // namespace

std::vector<Finding> ExamineLimits() {
  return {ExamineDescriptors(), ExamineLockedMemory(), ExamineHugePages(), ExamineSharedMemory(),
          ExamineGroups()};
}

}  // namespace prefixd::ctl
