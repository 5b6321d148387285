// Measures put, restore and row reads through storage/ and runtime/, each in turns with its floor
// on the same file system: fio for the disk, memcpy for the host tier.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "measure/prompts/bench_prompt.h"
#include "measure/timing/paired.h"

namespace prefixd::bench {

struct SpeedOptions {
  std::filesystem::path dir;  // empty, on the disk to be measured
  std::vector<std::string> parts = {"put", "segment", "restore", "rows", "host", "reclustered"};
  uint32_t pairs = 7;
  uint32_t threads = 0;  // threads of a restore; 0: one per core
  std::string io = "auto";
  bool fio = true;                                   // false: no floor for what the disk does
  bool source = false;                               // with "put": source_read, which takes writes
  std::function<void(const std::string&)> progress;  // may be empty
};

struct SpeedReport {
  std::string io_backend, fio_engine;
  uint32_t threads = 0;
  std::map<std::string, Paired> lines;  // key: the part
  std::vector<std::string> skipped;     // parts and floors that failed, with the reason
  double row_amplification = 0;         // of "rows": bytes read from the disk over those of rows
  // Speed at which one thread reads the prompt's keys and values once, after fio wrote, for `put`.
  // A put must read them; fio writes the same 16 MiB again and again and need not.
  Spread source_read;  // bytes per second
};

// Leaves `dir` empty. A part that fails is left out, and one whose floor fails stands alone; an
// error when no part could be measured.
//
// "rows" and "host_rows" are single rows as a step asks for them, of each head in ascending order;
// "reclustered_rows" and "reclustered_host_rows" are the same after reclustering, which, like
// "reclustered", comes behind all other parts.
Result<SpeedReport> MeasureSpeed(const Prompt& prompt, const SpeedOptions& options);

}  // namespace prefixd::bench
