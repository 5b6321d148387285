// Runs the command line that all benchmarks share.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>

#include "prefixd/result.h"

namespace prefixd::bench {

// Adds --json to the options of `app`, parses the arguments and runs. Returns the exit code: 0;
// CLI11's for invalid arguments; 1, with the error on stderr, when `run` fails.
inline int BenchMain(CLI::App& app, int argc, char** argv, std::string& json_file,
                     const std::function<Status()>& run) {
  app.add_option("--json", json_file, "Also write the figures here");
  CLI11_PARSE(app, argc, argv);
  const Status status = run();
  if (status.ok()) return 0;
  const std::string name = std::filesystem::path(argv[0]).filename().string();
  std::fprintf(stderr, "%s: %s\n", name.c_str(), status.error().ToString().c_str());
  return 1;
}

}  // namespace prefixd::bench
