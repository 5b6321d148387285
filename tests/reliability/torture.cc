// Runs the reliability harnesses for a given time: stoppable by SIGINT or SIGTERM, resumable from
// its state files, figures as a table and as JSON.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/reliability/harness/harness.h"

namespace prefixd::storage::reliability {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;
using nlohmann::json;

volatile std::sig_atomic_t stop_requested = 0;
void OnStop(int) { stop_requested = 1; }

struct Arguments {
  std::string harness = "all";
  uint64_t cycles = 0;  // 0: the harness's own
  uint64_t first = 0;
  uint64_t seed = 0;
  uint64_t seconds = 0;  // per harness; 0: no limit
  uint32_t workers = 2;
  bool resume = false;
  fs::path state_dir = "build/torture";
  fs::path json_file;
};

// Progress is the state of one harness's run; the state file holds it.
struct Progress {
  uint64_t seed = 0, next = 0, end = 0;
  double seconds = 0;
  std::map<std::string, uint64_t> counts;
  std::vector<std::string> violations;
  std::string skipped;
};

json ToJson(const Harness& harness, const Progress& p) {
  json out{{"harness", harness.name},
           {"what", harness.what},
           {"seed", p.seed},
           {"cycles", p.next},
           {"of", p.end},
           {"seconds", p.seconds},
           {"counts", p.counts},
           {"violations", p.violations}};
  if (!p.skipped.empty()) out["skipped"] = p.skipped;
  return out;
}

Progress FromJson(const json& in) {
  Progress p;
  p.seed = in.at("seed");
  p.next = in.at("cycles");
  p.seconds = in.at("seconds");
  p.counts = in.at("counts").get<std::map<std::string, uint64_t>>();
  p.violations = in.at("violations").get<std::vector<std::string>>();
  return p;
}

// The file is replaced whole or not at all: a stop may come at any moment.
void Save(const fs::path& path, const json& value) {
  const fs::path temp = path.string() + ".tmp";
  std::ofstream(temp) << value.dump(2) << "\n";
  fs::rename(temp, path);
}

void Print(const Harness& harness, const Progress& p) {
  std::printf("%-8s %llu of %llu cycles, %.0f s, %.1f cycles/s, %zu violations", harness.name,
              static_cast<unsigned long long>(p.next), static_cast<unsigned long long>(p.end),
              p.seconds, p.seconds > 0 ? static_cast<double>(p.next) / p.seconds : 0.0,
              p.violations.size());
  std::printf("; %s\n", Totals::Text(p.counts).c_str());
  std::fflush(stdout);
}

Progress RunHarness(const Harness& harness, const Arguments& args) {
  const fs::path state = args.state_dir / (std::string(harness.name) + ".json");
  Progress p;
  p.seed = args.seed;
  p.next = args.first;
  if (args.resume && fs::exists(state)) p = FromJson(json::parse(std::ifstream(state)));
  const Prepared prepared = harness.prepare(/*torture=*/true);
  if (!prepared.skipped.empty()) {
    p.skipped = prepared.skipped;
    std::printf("%-8s skipped: %s\n", harness.name, p.skipped.c_str());
    return p;
  }
  if (!prepared.points.empty()) {
    std::printf("%-8s %zu named points:", harness.name, prepared.points.size());
    for (const std::string& name : prepared.points) std::printf(" %s", name.c_str());
    std::printf("\n");
  }
  const Progress before = p;
  p.end = args.cycles > 0 ? args.first + args.cycles : harness.torture;
  const auto start = Clock::now();
  const auto elapsed = [&] { return std::chrono::duration<double>(Clock::now() - start).count(); };
  CyclesPlan plan;
  plan.first = before.next;
  plan.end = p.end;
  plan.seed = p.seed;
  plan.workers = args.workers;
  plan.max_violations = 20;
  plan.stop = [&] {
    return stop_requested != 0 ||
           (args.seconds > 0 && elapsed() > static_cast<double>(args.seconds));
  };
  auto printed = start;
  plan.progress = [&](uint64_t next, const Totals& totals) {
    p.next = next;
    p.seconds = before.seconds + elapsed();
    p.counts = before.counts;
    for (const auto& [name, n] : totals.counts) p.counts[name] += n;
    p.violations = before.violations;
    p.violations.insert(p.violations.end(), totals.violations.begin(), totals.violations.end());
    Save(state, ToJson(harness, p));
    if (Clock::now() - printed < std::chrono::seconds(30)) return;
    printed = Clock::now();
    Print(harness, p);
  };
  (void)RunCycles(plan, prepared.cycle);
  Print(harness, p);
  for (const std::string& violation : p.violations)
    std::printf("VIOLATION %s\n", violation.c_str());
  return p;
}

int Run(const Arguments& args) {
  fs::create_directories(args.state_dir);
  json all = json::array();
  bool sound = true;
  for (const Harness& harness : Harnesses()) {
    if (args.harness != "all" && args.harness != harness.name) continue;
    if (stop_requested != 0) break;
    const Progress p = RunHarness(harness, args);
    sound = sound && p.violations.empty();
    all.push_back(ToJson(harness, p));
  }
  if (!args.json_file.empty()) Save(args.json_file, {{"harnesses", all}});
  if (stop_requested != 0) std::printf("stopped; --resume goes on from here\n");
  return sound ? 0 : 1;
}

}  // namespace
}  // namespace prefixd::storage::reliability

int main(int argc, char** argv) {
  using namespace prefixd::storage::reliability;
  CLI::App app{
      "Tortures the store; exit code 1 when anything acknowledged was lost, anything wrong "
      "was served or anything leaked. docs/reliability.md says what each harness proves."};
  Arguments args;
  args.seed = std::random_device{}();
  std::vector<std::string> names{"all"};
  std::string list;
  for (const Harness& harness : Harnesses()) {
    names.emplace_back(harness.name);
    list += std::string("\n  ") + harness.name + ": " + harness.what;
  }
  app.add_option("harness", args.harness, "which one:" + list + "\n  all: one after the other")
      ->check(CLI::IsMember(names));
  app.add_option("--cycles", args.cycles, "how many (default: each harness's own number)");
  app.add_option("--first", args.first,
                 "number of the first: --seed S --first N --cycles 1 runs "
                 "again what a violation names");
  app.add_option("--seed", args.seed, "default: fresh")->envname("PREFIXD_SEED");
  app.add_option("--seconds", args.seconds, "stop each harness after so long");
  app.add_option("--workers", args.workers, "processes at a time")->check(CLI::Range(1, 64));
  app.add_flag("--resume", args.resume, "go on where the state files say");
  app.add_option("--state-dir", args.state_dir, "where the state files are")->capture_default_str();
  app.add_option("--json", args.json_file, "write the figures there");
  CLI11_PARSE(app, argc, argv);
  std::signal(SIGINT, OnStop);
  std::signal(SIGTERM, OnStop);
  return Run(args);
}
