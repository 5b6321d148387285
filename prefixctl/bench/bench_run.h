// Runs one of the benchmarks of `prefixctl bench` in a folder of its own and shows its report.
#pragma once

#include <functional>
#include <string>

#include "measure/page/report.h"
#include "prefixd/result.h"

namespace prefixd::ctl {

// What every benchmark is asked.
struct BenchOptions {
  std::string dir;  // of the disk to be measured; empty: ScratchParent
  std::string json_file, html_file;
  bool quick = false, plan_only = false, quiet = false;
};

// A benchmark: plans in a folder, and then measures in it what it planned.
struct Benchmark {
  std::string name;
  std::function<Result<bench::Plan>(const std::string& dir)> plan;
  std::function<Result<bench::Report>(
      const std::vector<std::pair<std::string, std::string>>& machine)>
      measure;
};

// Prints the plan, measures, prints tables and verdict, and writes the files that were asked for.
// Returns the exit code.
int RunBenchmark(const BenchOptions& options, const Benchmark& benchmark);

// Prints a line about what is done now on standard error, unless `quiet`.
std::function<void(const std::string&)> BenchProgress(bool quiet);

}  // namespace prefixd::ctl
