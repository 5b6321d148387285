// Declares the flags of `prefixd`: one for every option of the configuration, and a few that no
// file has. They lie apart from main.cc so that prefixctl can complete them in a shell.
#pragma once

#include <CLI/App.hpp>
#include <map>
#include <string>

namespace prefixd::daemon {

struct CommandLine {
  std::string config_file;
  std::map<std::string, std::string> flags;  // values, keyed by Option::flag
  bool print_config = false;
  bool reference = false;
  int ready_fd = -1;
};

// Declares all flags but --help and --version. `line` must outlive `app`.
void DeclareOptions(CLI::App* app, CommandLine* line);

}  // namespace prefixd::daemon
