// Runs `prefixctl bench break-even`: plans what fits into the time, the disk and the memory,
// measures it and reports.
//
// Thread-safety: one thread at a time.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "measure/break_even/measure_tiers.h"
#include "measure/page/report.h"

namespace prefixd::bench {

struct BreakEvenOptions {
  std::string model = "Llama-3.1-8B";  // as ModelShapeOf takes it
  std::vector<uint32_t> lengths;       // empty: 16384, 131072, 1048576; quick: 4096
  uint32_t layers = 0;                 // measured of the model's; 0: as many as fit
  uint32_t steps = 0;                  // measured tokens for each point; 0: 15, quick: 3
  double minutes = 0;                  // that the run may take, about; 0: 5, quick: 0.5
  double prefill_rate = 0;             // tokens per second; 0: from the rate of matrix products
  std::string selector = "auto";
  bool quick = false;
};

struct BreakEvenPlan {
  ModelShape model;
  std::vector<LengthSpec> lengths;
  std::vector<std::string> skipped;
  double prefill_rate = 0;
  bool quick = false;
  Medium medium;
  Plan plan;
};

using Progress = std::function<void(const std::string&)>;

// Runs a small prompt below `dir`, to know how long the rest will take. kInvalidArgument: options
// that contradict each other. kResourceExhausted: nothing fits.
Result<BreakEvenPlan> PlanBreakEven(const BreakEvenOptions& options,
                                    const std::filesystem::path& dir, const Progress& progress);
// A length that cannot be measured is left out, and named with the reason; an error when none can.
Result<BreakEvenOutcome> MeasureBreakEven(const BreakEvenPlan& plan, const Progress& progress);

// report.cc: tables and verdict; page.cc: the page; and all of it together.
std::vector<std::pair<std::string, TextTable>> BreakEvenTables(const BreakEvenOutcome& outcome);
std::vector<std::string> BreakEvenVerdict(const BreakEvenOutcome& outcome);
HtmlPage BreakEvenPage(const BreakEvenOutcome& outcome,
                       const std::vector<std::pair<std::string, std::string>>& machine);
Report BreakEvenReport(const BreakEvenOutcome& outcome,
                       const std::vector<std::pair<std::string, std::string>>& machine);

}  // namespace prefixd::bench
