// Declares `prefixctl bench`: whether keeping prompts pays on this machine. It needs no daemon and
// touches no store: it works in a folder of its own, which is gone when it ends.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>

namespace prefixd::ctl {

// `chosen` runs the benchmark that the command line asked for and returns the exit code: 0; 1 after
// an error, which is printed; 128 + the number of the signal that ended it.
void DeclareBench(CLI::App* app, std::function<int()>* chosen);

}  // namespace prefixd::ctl
