#include "daemon/settings/command_line.h"

#include <CLI/CLI.hpp>

#include "daemon/settings/config.h"

namespace prefixd::daemon {

void DeclareOptions(CLI::App* app, CommandLine* line) {
  app->add_option("-c,--config", line->config_file, "Configuration file (TOML). Flags override it.")
      ->type_name("FILE");
  app->add_flag("--print-config", line->print_config,
                "Print the configuration that would be used, with every key explained, as a file "
                "for --config; then exit.");
  app->add_flag("--reference", line->reference, "Print docs/reference.md; then exit.")
      ->group("");  // hidden: for those who change prefixd
  app->add_option("--ready-fd", line->ready_fd,
                  "Write the ready line to this file descriptor too, and close it.")
      ->type_name("FD");
  Config defaults;
  for (const Option& option : OptionsOf(defaults)) {
    // Completion in shells reads the choices from this text.
    std::string type = option.unit.name.empty() ? "VALUE" : std::string(option.unit.name);
    if (std::holds_alternative<bool*>(option.place)) type = "true|false";
    for (size_t i = 0; i < option.choices.size(); ++i) {
      type = (i ? type + "|" : "") + std::string(option.choices[i]);
    }
    const std::string section(option.section());
    app->add_option_function<std::string>(
           "--" + option.flag,
           [line, flag = option.flag](const std::string& text) { line->flags[flag] = text; },
           std::string(option.help))
        ->type_name(type)
        ->group(section.empty() ? "Store" : "[" + section + "]");
  }
}

}  // namespace prefixd::daemon
