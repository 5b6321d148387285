// Shell completion: scripts for bash, zsh and fish, made from the declared commands and options, so
// that they can never offer anything else.
#pragma once

#include <CLI/App.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace prefixd::ctl {

// What can stand where a value is expected.
struct CompletionValue {
  enum class Kind { kAnything, kFile, kChoice, kPrefix, kModel };
  Kind kind = Kind::kAnything;
  std::vector<std::string> choices;  // of kChoice
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

// `app` and everything below it, parents first. Values are told by the names of their types: FILE
// and PATH are files, words in lower case between bars are choices; the arguments `prefix` and
// `model` are looked up in the running daemon.
std::vector<CompletionCommand> CommandsOf(const CLI::App& app, const std::string& name);

// Of both programs. Each shell's file may be sourced, or installed where the shell looks for it.
std::string BashCompletion(const std::vector<CompletionCommand>& commands);
std::string ZshCompletion(const std::vector<CompletionCommand>& commands);
std::string FishCompletion(const std::vector<CompletionCommand>& commands);

}  // namespace prefixd::ctl
