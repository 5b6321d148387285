// Counts what the clients do and find, in memory that all processes share.
#pragma once

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <new>
#include <string>
#include <string_view>

#include "tests/soak/step_times.h"

namespace prefixd::soak {

enum class Op : size_t {
  kConnect,
  kAttach,
  kStep,
  kBatch,
  kExact,
  kRead,
  kInPlace,
  kPolicy,
  kReport,
  kDetach,
  kMatch,
  kPut,
  kAbort,
  kEarlyCommit,
  kRemove,
  kLifetime,
  kVerify,
  kReady,
  kList,
  kForeign,
  kVandal,
  kCount
};
inline constexpr std::array<const char*, size_t(Op::kCount)> kOpNames = {
    "connect",       "attach",        "step",       "step_batch",   "attend_exact",
    "read",          "read_in_place", "set_policy", "report",       "detach",
    "match",         "put",           "abort",      "early commit", "remove",
    "set_lifetime",  "verify",        "wait_ready", "list",         "of another tenant",
    "raw connection"};

struct Tally {
  std::array<std::atomic<uint64_t>, size_t(Op::kCount)> done{};
  std::atomic<uint64_t> shed{0};      // refused with kResourceExhausted
  std::atomic<uint64_t> failed{0};    // any other refusal that should not have been
  std::atomic<uint64_t> compared{0};  // answers held against the embedded store's
  std::atomic<uint64_t> equal{0};     // of these, equal bit by bit
  std::atomic<uint64_t> wrong{0};     // of these, farther than the tolerance
  std::atomic<uint64_t> largest_difference_e9{0};
  StepTimes steps;
  std::atomic<bool> stop{false};
  std::atomic<int> errors{0};
  std::array<std::array<char, 400>, 16> first_errors{};  // [errors]

  void Add(Op op, uint64_t n = 1) { done[static_cast<size_t>(op)] += n; }
  void Note(std::string_view what) {
    const int at = errors++;
    if (at >= static_cast<int>(first_errors.size())) return;
    auto& line = first_errors[static_cast<size_t>(at)];
    std::snprintf(line.data(), line.size(), "%.*s", static_cast<int>(what.size()), what.data());
  }
  uint64_t total() const {
    uint64_t sum = 0;
    for (const auto& n : done) sum += n;
    return sum;
  }

  // Null when there is no memory. It lasts until the process ends.
  static Tally* Make() {
    void* memory =
        ::mmap(nullptr, sizeof(Tally), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? nullptr : new (memory) Tally;
  }
};

}  // namespace prefixd::soak
