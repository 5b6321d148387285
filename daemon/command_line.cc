#include "daemon/command_line.h"

#include <CLI/CLI.hpp>

#include "daemon/config.h"

namespace prefixd::daemon {

void DeclareOptions(CLI::App* app, CommandLine* line) {
  app->add_option("-c,--config", line->config_file, "Configuration file (TOML). Flags override it.")
      ->type_name("FILE");
  app->add_flag("--print-config", line->print_config,
                "Print the configuration that would be used, with every key explained, as a file "
                "for --config; then exit.");
  app->add_option("--ready-fd", line->ready_fd,
                  "Write the ready line to this file descriptor too, and close it.")
      ->type_name("FD");
  for (const ConfigItem& item : ConfigItems()) {
    // Completion in shells takes choices from here, too.
    std::string type = *item.unit ? item.unit : "VALUE";
    if (std::holds_alternative<bool Config::*>(item.member)) type = "true|false";
    for (size_t i = 0; i < item.choices.size(); ++i) {
      type = (i ? type + "|" : "") + std::string(item.choices[i]);
    }
    app->add_option_function<std::string>(
           std::string("--") + item.flag,
           [line, flag = std::string(item.flag)](const std::string& text) {
             line->flags[flag] = text;
           },
           item.help)
        ->type_name(type)
        ->group(*item.section ? std::string("[") + item.section + "]" : "Store");
  }
}

}  // namespace prefixd::daemon
