// Runs `prefixctl bench io`: put, restore, rows and attach on a disk and in memory, beside what fio
// and memcpy do there in the same run.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "measure/disk/attach_time.h"
#include "measure/disk/medium.h"
#include "measure/disk/storage_speed.h"
#include "measure/models/model_shape.h"
#include "measure/page/report.h"

namespace prefixd::bench {

struct IoOptions {
  std::string model = "Llama-3.2-1B";
  uint32_t tokens = 0;  // 0: 16384; quick: 2048
  uint32_t layers = 0;  // of the model's; 0: as many as fit
  uint32_t pairs = 0;   // of ours and the floor; 0: 7; quick: 2
  bool quick = false;
};

struct IoPlan {
  ModelShape model;
  uint32_t tokens = 0, layers = 0, pairs = 0, attach_layers = 0;
  std::string fio;  // its version; empty: there is none
  std::vector<std::string> skipped;
  std::filesystem::path dir;
  Medium medium;
  Plan plan;
};

struct IoOutcome {
  IoPlan what;
  SpeedReport speed;
  std::optional<AttachReport> attach;
  double stored_per_row_byte = 0;    // what a put leaves on the disk, over its rows
  std::vector<std::string> skipped;  // of the plan, and what failed
  double other_work = 0;             // of the machine, while it was measured
};

using IoProgress = std::function<void(const std::string&)>;

Result<IoPlan> PlanIo(const IoOptions& options, const std::filesystem::path& dir,
                      const IoProgress& progress);
// What fails is left out, and named with the reason; an error when no part could be measured.
Result<IoOutcome> MeasureIo(const IoPlan& plan, const IoProgress& progress);
Report IoReport(const IoOutcome& outcome,
                const std::vector<std::pair<std::string, std::string>>& machine);

}  // namespace prefixd::bench
