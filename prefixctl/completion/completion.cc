#include "prefixctl/completion/completion.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cctype>
#include <utility>

namespace prefixd::ctl {
namespace {

std::string Lower(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

CompletionValue ValueOf(const std::string& type, const std::string& name) {
  using Kind = CompletionValue::Kind;
  if (name == "prefix") return {Kind::kPrefix, {}};
  if (name == "model") return {Kind::kModel, {}};
  const std::string lower = Lower(type);
  if (lower == "file" || lower.rfind("path", 0) == 0) return {Kind::kFile, {}};
  CompletionValue value;
  if (type.find('|') == std::string::npos) return value;
  for (size_t at = 0; at <= type.size();) {
    const size_t end = std::min(type.find('|', at), type.size());
    const std::string choice = type.substr(at, end - at);
    if (choice == Lower(choice)) value.choices.push_back(choice);
    at = end + 1;
  }
  value.kind = Kind::kChoice;
  return value;
}

void Collect(const CLI::App& app, const std::string& path, std::vector<CompletionCommand>* out) {
  CompletionCommand command{path, {}, {}, {}};
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_group().empty()) continue;  // hidden
    CompletionOption o;
    for (const std::string& name : option->get_lnames()) o.names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) o.names.push_back("-" + name);
    o.takes_value = option->get_items_expected_max() > 0;
    o.value = ValueOf(option->get_type_name(), option->get_name(true));
    o.help = option->get_description();
    if (o.names.empty()) {
      command.arguments.push_back(std::move(o.value));
    } else {
      command.options.push_back(std::move(o));
    }
  }
  const auto subcommands = app.get_subcommands([](const CLI::App*) { return true; });
  for (const CLI::App* sub : subcommands) {
    command.subcommands.emplace_back(sub->get_name(), sub->get_description());
  }
  out->push_back(std::move(command));
  for (const CLI::App* sub : subcommands) Collect(*sub, path + " " + sub->get_name(), out);
}

}  // namespace

std::vector<CompletionCommand> CommandsOf(const CLI::App& app, const std::string& name) {
  std::vector<CompletionCommand> commands;
  Collect(app, name, &commands);
  return commands;
}

}  // namespace prefixd::ctl
