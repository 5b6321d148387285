#include "prefixctl/bench/bench_run.h"

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "measure/disk/medium.h"
#include "measure/disk/scratch.h"
#include "measure/page/text.h"
#include "measure/timing/json_file.h"
#include "measure/timing/machine.h"
#include "prefixctl/commands/commands.h"
#include "prefixctl/show/output.h"

namespace prefixd::ctl {
namespace {

namespace fs = std::filesystem;

constexpr const char* kStore = "/var/lib/prefixd";  // the daemon's, unless it is told another

int Fail(const Error& error) {
  std::fflush(stdout);
  std::fprintf(stderr, "prefixctl: %s\n", Printable(error.message).c_str());
  return kExitError;
}

int Finish(const Status& status) {
  if (!status.ok()) return Fail(status.error());
  const Status written = FinishOutput();
  return written.ok() ? kExitOk : Fail(written.error());
}

// Breaks a sentence into lines of a terminal; later lines are indented.
void PrintWrapped(const std::string& text, size_t indent) {
  constexpr size_t kWidth = 100;
  std::string line(indent, ' ');
  size_t begin = 0;
  while (begin < text.size()) {
    const size_t end = std::min(text.find(' ', begin), text.size());
    const bool first = line.size() == indent;
    if (!first && line.size() + 1 + end - begin > kWidth) {
      std::printf("%s\n", line.c_str());
      line.assign(indent, ' ');
    } else if (!first) {
      line += ' ';
    }
    line += text.substr(begin, end - begin);
    begin = end + 1;
  }
  std::printf("%s\n", line.c_str());
}

// Files for results must be writable before hours of measuring, not after. A run that has no
// results leaves no file.
Status CheckFile(const std::string& file) {
  if (file.empty()) return {};
  std::error_code ec;
  const bool missing = fs::symlink_status(file, ec).type() == fs::file_type::not_found;
  std::ofstream out(file, std::ios::app);
  if (!out) return Error{Code::kIo, "cannot write '" + file + "'"};
  if (missing) fs::remove(file, ec);
  return {};
}

Status Show(const BenchOptions& options, bench::Report& report) {
  for (const auto& [title, table] : report.tables) {
    std::printf("\n%s\n", title.c_str());
    PrintTable(table);
  }
  if (!report.skipped.empty()) std::printf("\nLeft out:\n");
  for (const std::string& what : report.skipped) PrintWrapped("- " + what, 2);
  std::printf("\nVerdict:\n");
  for (const std::string& sentence : report.verdict) PrintWrapped("- " + sentence, 2);
  if (!options.json_file.empty()) {
    report.figures["verdict"] = report.verdict;
    PREFIXD_TRY(bench::WriteJson(options.json_file, report.figures));
    std::printf("\nFigures: %s\n", options.json_file.c_str());
  }
  if (!options.html_file.empty()) {
    PREFIXD_TRY(report.page.Write(options.html_file));
    std::printf("%sPage: %s\n", options.json_file.empty() ? "\n" : "", options.html_file.c_str());
  }
  return {};
}

int Work(const BenchOptions& options, const Benchmark& benchmark, const fs::path& dir) {
  const auto machine = bench::MachineFacts(dir);
  const auto plan = benchmark.plan(dir.string());
  if (!plan.ok()) return Fail(plan.error());
  for (const std::string& sentence : plan->sentences) PrintWrapped(sentence, 2);
  std::printf("It takes about %s and writes about %s to %s, which goes when it ends.\n",
              bench::Seconds(plan->seconds).c_str(), bench::GigaBytes(plan->bytes).c_str(),
              dir.c_str());
  const bench::Medium medium = bench::MediumOf(dir);
  if (!medium.disk) PrintWrapped(medium.sentence, 0);
  std::fflush(stdout);
  if (options.plan_only) return Finish({});
  auto report = benchmark.measure(machine);
  if (!report.ok()) return Fail(report.error());
  return Finish(Show(options, *report));
}

}  // namespace

std::function<void(const std::string&)> BenchProgress(bool quiet) {
  return [quiet](const std::string& what) {
    if (!quiet) std::fprintf(stderr, "   %s ...\n", what.c_str());
  };
}

int RunBenchmark(const BenchOptions& options, const Benchmark& benchmark) {
  const fs::path parent =
      options.dir.empty() ? bench::ScratchParent(kStore) : fs::path(options.dir);
  for (const std::string* file : {&options.json_file, &options.html_file}) {
    const Status writable = CheckFile(*file);
    if (!writable.ok()) return Fail(writable.error());
  }
  if (options.dir.empty() && !bench::OnOneDisk(parent, kStore)) {
    std::printf(
        "%s is not on the disk of %s; --dir names a directory on the disk to be measured.\n",
        parent.c_str(), kStore);
  }
  const auto code = bench::RunInScratch(
      parent, [&](const fs::path& dir) { return Work(options, benchmark, dir); });
  if (!code.ok()) return Fail(code.error());
  if (*code > 128) {
    std::fprintf(stderr,
                 "prefixctl: bench %s was ended by signal %d; nothing of it is left in %s\n",
                 benchmark.name.c_str(), *code - 128, parent.c_str());
  }
  return *code;
}

}  // namespace prefixd::ctl
