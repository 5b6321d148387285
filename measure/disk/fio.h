// Runs fio (Debian package `fio`) as the floor of disk measurements: one job, to its end.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "prefixd/result.h"

namespace prefixd::bench {

struct FioJob {
  std::string pattern;         // fio's --rw: "write", "read", "randread"
  std::filesystem::path file;  // written anew, or an existing one that is only read
  std::string engine = "io_uring";
  uint64_t offset = 0, bytes = 0;  // in the file
  uint64_t total_bytes = 0;        // moved in total; 0: `bytes`
  uint64_t block_bytes = 1u << 20;
  uint32_t depth = 1;
};

struct FioFigure {
  double seconds = 0;
  double bytes_per_second = 0, operations_per_second = 0;
  double cpu_seconds = 0;  // user and system time of the job's thread, as fio counts it
};

// Uses O_DIRECT always. A write goes to a new file whose blocks are allocated before the clock
// starts; one fsync ends it within the time. kNotFound: there is no fio on PATH. kUnavailable: fio
// does not start or ends with an error.
Result<FioFigure> RunFio(const FioJob& job);

// Tries fio below `dir` as measurements use it, with a file of one block. kUnavailable: why it
// cannot be used here.
Status TryFio(const std::filesystem::path& dir);

// Returns "fio-3.33", for example; kNotFound, with the sentence that says how to get fio, when
// there is none.
Result<std::string> FioVersion();

}  // namespace prefixd::bench
