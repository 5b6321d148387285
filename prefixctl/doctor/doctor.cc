#include "prefixctl/doctor/doctor.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "prefixctl/commands/operate.h"
#include "prefixctl/show/output.h"

namespace prefixd::ctl {
namespace {

const char* LevelName(Level level) {
  return level == Level::kOk ? "ok" : level == Level::kWarn ? "warn" : "fail";
}

}  // namespace

std::string FirstLine(const std::filesystem::path& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  return line;
}

namespace {

// Findings that could not be written are not known to be well.
int Finish(int worst) {
  const Status written = FinishOutput();
  if (written.ok()) return worst;
  std::fprintf(stderr, "prefixctl: %s\n", written.error().message.c_str());
  return std::max(worst, kExitError);
}

}  // namespace

int Examine(const Options& options) {
  std::vector<Finding> findings = ExamineMachine();
  std::ranges::move(ExamineLimits(), std::back_inserter(findings));
  std::ranges::move(ExamineDisk(options.dir.empty() ? "/var/lib/prefixd" : options.dir),
                    std::back_inserter(findings));
  findings.push_back(ExamineSocket(options.socket));
  int worst = 0;
  for (const Finding& f : findings) worst = std::max(worst, static_cast<int>(f.level));
  if (options.json) {
    nlohmann::json list = nlohmann::json::array();
    for (const Finding& f : findings) {
      list.push_back({{"name", f.name},
                      {"level", LevelName(f.level)},
                      {"found", f.found},
                      {"advice", f.advice}});
    }
    PrintJson({{"level", LevelName(static_cast<Level>(worst))}, {"findings", std::move(list)}});
    return Finish(worst);
  }
  std::vector<std::vector<std::string>> rows;
  for (const Finding& f : findings) {
    rows.push_back({LevelName(f.level), f.name, f.found});
    if (!f.advice.empty()) rows.push_back({"", "", "-> " + f.advice});
  }
  PrintTable(rows);
  return Finish(worst);
}

}  // namespace prefixd::ctl
