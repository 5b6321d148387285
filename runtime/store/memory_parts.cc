#include "runtime/store/memory_parts.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

namespace prefixd {
namespace {

constexpr uint64_t kMebi = 1ull << 20;
constexpr uint64_t kLeastMemory = 128 * kMebi;
constexpr uint64_t kLeastReserve = 48 * kMebi, kMostReserve = 1024 * kMebi;
// What no part may take: requests, replies, puts, sessions and summaries need some.
constexpr uint64_t kLeastForCalls = 32 * kMebi;
constexpr uint64_t kDefaultMemory = 1024 * kMebi;  // at least, where the machine has it

// The program, its allocator's slack and what nobody counts.
uint64_t Reserve(uint64_t memory) { return std::clamp(memory / 10, kLeastReserve, kMostReserve); }

std::string InMib(uint64_t bytes) { return std::to_string(bytes / kMebi) + " MiB"; }

// The least limit of the control groups from `group` up; UINT64_MAX: none.
uint64_t GroupLimit(std::filesystem::path group) {
  const std::filesystem::path root = "/sys/fs/cgroup";
  uint64_t least = UINT64_MAX;
  for (group = root / group.relative_path(); group.native().size() >= root.native().size();
       group = group.parent_path()) {
    std::ifstream in(group / "memory.max");
    std::string text;
    uint64_t limit = 0;
    if (!(in >> text)) continue;
    if (std::from_chars(text.data(), text.data() + text.size(), limit).ec == std::errc()) {
      least = std::min(least, limit);
    }
  }
  return least;
}

struct Part {
  const char* key;
  uint64_t* bytes;
  double share;  // of the memory, where nothing else is said
};

}  // namespace

uint64_t MachineMemory() {
  const uint64_t machine =
      static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(::getpagesize());
  std::ifstream in("/proc/self/cgroup");
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("0::")) return std::min(machine, GroupLimit(line.substr(3)));
  }
  return machine;
}

Result<RuntimeOptions> WithMemoryParts(RuntimeOptions o, uint64_t machine) {
  const std::array<Part, 3> parts = {
      Part{"store.host_tier_mib", &o.host_tier_bytes, 0.40},
      Part{"store.selector_memory_mib", &o.selector_memory_bytes, 0.20},
      Part{"store.gathered_rows_mib", &o.gathered_rows_bytes, 0.05}};
  uint64_t given = 0;
  double share_given = 0, share_left = 0;
  std::string names;
  for (const Part& part : parts) {
    if (*part.bytes == kByMemory) {
      share_left += part.share;
      continue;
    }
    if (*part.bytes > machine) {
      return InvalidArgument(std::string(part.key) + " of " + InMib(*part.bytes) +
                             " does not fit this machine's memory of " + InMib(machine) +
                             "; make it smaller (0: none)");
    }
    share_given += part.share;
    given += *part.bytes;
    names += (names.empty() ? "" : ", ") + std::string(part.key) + " " + InMib(*part.bytes);
  }
  if (o.memory_bytes == 0) {
    // Parts that somebody has measured out are a reason to take more, as far as the machine has it.
    const uint64_t all = given + given / 3 + kLeastReserve + kLeastForCalls;
    o.memory_bytes = std::min(machine, std::max({machine / 2, kDefaultMemory, all}));
  }
  if (o.memory_bytes < kLeastMemory) {
    return InvalidArgument("a store takes at least " + InMib(kLeastMemory) + " of memory, not " +
                           InMib(o.memory_bytes) + " (store.memory_mib)");
  }
  const uint64_t for_parts = o.memory_bytes - Reserve(o.memory_bytes) - kLeastForCalls;
  if (given > for_parts) {
    return InvalidArgument(names + " together do not fit into store.memory_mib " +
                           InMib(o.memory_bytes) + ", of which they may take " + InMib(for_parts) +
                           "; make them smaller, or give more memory");
  }
  // What is given takes the place of its own share first, and then of the others'.
  const double memory = double(o.memory_bytes);
  const double room = std::max(0.0, memory * (share_given + share_left) - double(given));
  const double scale = std::min(1.0, room / std::max(memory * share_left, 1.0));
  for (const Part& part : parts) {
    if (*part.bytes == kByMemory) {
      *part.bytes = static_cast<uint64_t>(memory * part.share * scale) / kMebi * kMebi;
    }
  }
  return o;
}

uint64_t TablesBytes(const RuntimeOptions& resolved) { return resolved.memory_bytes / 16; }

std::shared_ptr<MemoryBudget> NewMemoryBudget(const RuntimeOptions& resolved) {
  return MemoryBudget::Create(
      {resolved.memory_bytes, Reserve(resolved.memory_bytes), resolved.tenant_memory_share});
}

}  // namespace prefixd
