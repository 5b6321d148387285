// Drives hundreds of sessions against a real daemon and checks that nothing breaks, grows, stays
// behind or answers differently from an embedded store. `make soak` runs it.
#include <signal.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>
#include <random>

#include "tests/soak/soak.h"

namespace {

std::atomic<bool> interrupted{false};

void Print(const prefixd::soak::Report& report) {
  std::printf("\n%-44s %14s %-10s %s\n", "", "measured", "", "held to");
  for (const auto& f : report.findings) {
    std::printf("%-44s %14.6g %-10s %s%s\n", f.name.c_str(), f.value, f.unit.c_str(),
                f.bound.c_str(), f.good ? "" : "   MISSED");
  }
  for (const std::string& error : report.errors) std::printf("! %s\n", error.c_str());
  std::printf("\n%s\n", report.good() ? "soak: good" : "soak: NOT good");
}

nlohmann::ordered_json ToJson(const prefixd::soak::Report& report, uint64_t seed) {
  nlohmann::ordered_json figures = nlohmann::ordered_json::array();
  for (const auto& f : report.findings) {
    figures.push_back({{"name", f.name},
                       {"value", f.value},
                       {"unit", f.unit},
                       {"held_to", f.bound},
                       {"good", f.good}});
  }
  const auto point = [&](const prefixd::soak::TenantPoint& p) {
    return nlohmann::ordered_json{{"tenant", report.tenants.names.at(p.tenant)},
                                  {"at_s", p.at},
                                  {"steps", p.steps},
                                  {"p50_us", p.p50_us},
                                  {"p99_us", p.p99_us}};
  };
  nlohmann::ordered_json whole = nlohmann::ordered_json::array(), points = whole;
  for (const auto& p : report.tenants.whole) whole.push_back(point(p));
  for (const auto& p : report.tenants.points) points.push_back(point(p));
  return {{"soak", figures},     {"tenants", whole},        {"flooding", report.tenants.flooding},
          {"over_time", points}, {"errors", report.errors}, {"good", report.good()},
          {"seed", seed}};
}

}  // namespace

int main(int argc, char** argv) {
  prefixd::soak::Options options;
  options.seed = std::random_device{}();
  std::string json;
  CLI::App app("Soaks a daemon: many sessions, clients that are killed, garbage, slow readers");
  app.add_option("--seconds", options.seconds, "How long the clients work")->capture_default_str();
  app.add_option("--sessions", options.sessions, "Sessions, all clients together")
      ->capture_default_str();
  app.add_option("--tenants", options.tenants, "Tenants, each with a token; the last one floods")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  app.add_option("--pause-ms", options.pause_ms,
                 "Mean time between calls of a client whose tenant does not flood")
      ->check(CLI::Range(0.0, 10000.0))
      ->capture_default_str();
  app.add_option("--memory-mib", options.memory_mib, "The daemon's budget of memory")
      ->check(CLI::Range(128, 1048576))
      ->capture_default_str();
  app.add_option("--clients", options.clients, "Client processes")
      ->check(CLI::Range(1, 200))
      ->capture_default_str();
  app.add_option("--kill-every", options.kill_every_s, "Mean time between kills of clients, in s")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  app.add_option("--idle-seconds", options.idle_seconds, "How long the idle daemon is measured")
      ->capture_default_str();
  app.add_option("--seed", options.seed, "Repeats the choices of a run (not its timing)")
      ->envname("PREFIXD_SEED");
  app.add_option("--json", json, "Also write the figures here");
  CLI11_PARSE(app, argc, argv);

  struct sigaction action {};
  action.sa_handler = [](int) { interrupted = true; };
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
  ::signal(SIGPIPE, SIG_IGN);
  std::printf(
      "soak: %u sessions of %u clients of %u tenants for %.0f s, --seed %llu; Ctrl-C ends it "
      "early\n",
      options.sessions, options.clients, options.tenants, options.seconds,
      static_cast<unsigned long long>(options.seed));
  std::fflush(stdout);
  const prefixd::soak::Report report = prefixd::soak::RunSoak(options, interrupted);
  Print(report);
  if (!json.empty()) std::ofstream(json) << ToJson(report, options.seed).dump(2) << "\n";
  return report.good() ? 0 : 1;
}
