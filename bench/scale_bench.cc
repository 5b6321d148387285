// Measures where one node's limits are: a daemon with 1 to 100,000 prefixes, 1 to 1,000 sessions,
// and prompts of 1,000 to 1,000,000 tokens.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "bench/scale/scale_options.h"
#include "bench/support/bench_main.h"
#include "measure/disk/scratch.h"
#include "measure/timing/json_file.h"

namespace prefixd::bench {
namespace {

using nlohmann::json;

struct Part {
  const char* name;
  Result<json> (*measure)(const ScaleOptions&);
};
constexpr Part kParts[] = {
    {"prefixes", MeasurePrefixes}, {"sessions", MeasureSessions}, {"lengths", MeasureLengths}};

Status Run(const ScaleOptions& options, const std::vector<std::string>& only,
           const std::string& json_file) {
  json figures = {{"prefix_tokens", options.prefix_tokens},
                  {"session_tokens", options.session_tokens},
                  {"prompts", options.prompts},
                  {"budget", options.budget}};
  for (const Part& part : kParts) {
    if (!only.empty() && std::ranges::find(only, part.name) == only.end()) continue;
    PREFIXD_ASSIGN(figures[part.name], part.measure(options));
  }
  return json_file.empty() ? Status() : WriteJson(json_file, std::move(figures));
}

}  // namespace
}  // namespace prefixd::bench

int main(int argc, char** argv) {
  using namespace prefixd::bench;
  ScaleOptions o;
  o.program = PREFIXD_BINARY;
  std::vector<std::string> only;
  std::string json_file;
  std::filesystem::path scratch = "/tmp";
  CLI::App app("Measures a daemon with many prefixes, with many sessions, and with long prompts.");
  const auto sizes = [&](const char* name, std::vector<uint32_t>& to, const char* help) {
    app.add_option(name, to, help)->delimiter(',')->check(CLI::Range(1, 100000000));
  };
  app.add_option("--only", only, "Parts: prefixes, sessions, lengths")
      ->delimiter(',')
      ->check(CLI::IsMember({"prefixes", "sessions", "lengths"}));
  sizes("--prefixes", o.prefixes, "Numbers of prefixes; the store grows from one to the next");
  sizes("--sessions", o.sessions, "Numbers of sessions");
  sizes("--lengths", o.lengths, "Tokens of a prompt");
  app.add_option(
         "--dir", o.dir,
         "Where the store of many prefixes lies and stays: a new or empty directory, or that of an "
         "earlier run")
      ->type_name("DIR");
  app.add_option("--scratch", scratch, "Where all else lies, and goes at the end; a short path")
      ->check(CLI::ExistingDirectory);
  app.add_option("--prefix-tokens", o.prefix_tokens, "Tokens of each of many prefixes")
      ->check(CLI::Range(8, 65536))
      ->capture_default_str();
  app.add_option("--session-tokens", o.session_tokens, "Tokens of the sessions' prompts")
      ->capture_default_str();
  app.add_option("--prompts", o.prompts, "Prompts of the sessions")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  app.add_option("--putters", o.putters, "Clients that put at a time")->capture_default_str();
  app.add_option("--connections", o.connections, "Clients that step at a time, at most")
      ->check(CLI::Range(1, 128))
      ->capture_default_str();
  app.add_option("--calls", o.calls, "Calls of each kind")->capture_default_str();
  app.add_option("--repeats", o.repeats, "Starts of each kind")
      ->check(CLI::Range(2, 100))
      ->capture_default_str();
  app.add_option("--block-s", o.block_s, "Seconds of steps for each number of sessions")
      ->capture_default_str();
  app.add_option("--budget", o.budget, "Of steps, as a share of the prompt's bytes")
      ->capture_default_str();
  app.add_option("--program", o.program, "The daemon, to compare versions")
      ->check(CLI::ExistingFile);
  app.add_option("--daemon", o.daemon, "Further arguments of the daemon")->delimiter(' ');
  return BenchMain(app, argc, argv, json_file, [&]() -> prefixd::Status {
    for (auto* list : {&o.prefixes, &o.sessions, &o.lengths}) std::ranges::sort(*list);
    PREFIXD_ASSIGN(const int code, RunInScratch(scratch, [&](const std::filesystem::path& folder) {
                     o.scratch = folder;
                     const prefixd::Status status = Run(o, only, json_file);
                     if (status.ok()) return 0;
                     std::fprintf(stderr, "scale_bench: %s\n", status.error().ToString().c_str());
                     return 1;
                   }));
    if (code == 0) return {};
    return prefixd::Error{prefixd::Code::kCancelled,
                          "ended early, with status " + std::to_string(code)};
  });
}
