// Makes shell completion scripts for bash, zsh and fish from the declared commands and options, so
// that they can never offer anything else.
#pragma once

#include <CLI/App.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace prefixd::ctl {

// The values that a shell offers for an option or an argument.
struct CompletionValue {
  enum class Kind { kAnything, kFile, kChoice, kPrefix, kModel };
  Kind kind = Kind::kAnything;
  std::vector<std::string> choices;  // kChoice only
};

struct CompletionOption {
  std::vector<std::string> names;  // "--socket", "-s"
  std::string help;
  bool takes_value = false;
  CompletionValue value;
};

struct CompletionCommand {
  std::string path;                                              // "prefixctl prefixes list"
  std::vector<CompletionOption> options;                         // without hidden ones
  std::vector<std::pair<std::string, std::string>> subcommands;  // name, help
  std::vector<CompletionValue> arguments;                        // by position
};

// Lists `app` and all commands below it, parents first. The name of a value's type gives its kind:
// FILE and PATH are files, words in lower case between bars are choices; the scripts look up the
// arguments `prefix` and `model` in the running daemon.
std::vector<CompletionCommand> CommandsOf(const CLI::App& app, const std::string& name);

// Each script serves prefixctl and prefixd, and may be sourced or installed where the shell looks
// for it.
std::string BashCompletion(const std::vector<CompletionCommand>& commands);
std::string ZshCompletion(const std::vector<CompletionCommand>& commands);
std::string FishCompletion(const std::vector<CompletionCommand>& commands);

}  // namespace prefixd::ctl
