#include "daemon/settings/reference.h"

#include <string_view>
#include <vector>

#include "base/memory_budget.h"
#include "base/tables/statistics.h"
#include "daemon/settings/config.h"
#include "protocol/server_stats.h"

namespace prefixd::daemon {
namespace {

std::string Monospaced(std::string_view text) {
  return text.empty() ? "" : "`" + std::string(text) + "`";
}

// Escapes bars, which would end the cell.
std::string Cell(std::string_view text) {
  std::string cell;
  for (const char c : text) cell += c == '|' ? "\\|" : std::string(1, c);
  return cell;
}

std::string OptionRow(const Option& option) {
  const OptionForm written = OptionForm::kWritten;
  const std::string value = OptionText(GetOption(option, written));
  const bool table = std::holds_alternative<std::map<std::string, uint64_t>*>(option.place);
  std::string member = Monospaced(option.name);
  if (option.unit.times > 1) member += table ? ", bytes by tenant" : ", bytes";
  if (option.unit.parts > 1) member += ", " + OptionBoundsText(option, OptionForm::kMember);
  return "| " + Monospaced(option.key) + " | " + Monospaced("--" + option.flag) + " | " +
         (value.empty() ? "none" : Monospaced(value)) + " | " +
         Cell(OptionBoundsText(option, written)) + " | " + member + " | " + Cell(option.help) +
         " |\n";
}

std::string OptionTables() {
  Config defaults;
  std::string page, section = "none yet";
  for (const Option& option : OptionsOf(defaults)) {
    if (section != option.section()) {
      section = option.section();
      page += "\n### " + (section.empty() ? "Top of the file" : "[" + section + "]") + "\n\n" +
              "| key | flag | default | bounds | embedded | meaning |\n|---|---|---|---|---|---|\n";
    }
    page += OptionRow(option);
  }
  return page;
}

template <typename S>
std::string StatisticTable(const std::string& title, const std::string& about) {
  std::string page = "\n### " + title + "\n\n" + about + "\n\n" +
                     "| name | kind | unit | meaning |\n|---|---|---|---|\n";
  ForEachStatistic<S>([&](const auto& statistic) {
    page += "| " + Monospaced(statistic.name);
    if (!statistic.parts.empty()) page += ", by " + std::string(statistic.part);
    page += " | " + std::string(StatisticKindName(statistic.kind)) + " | " +
            std::string(StatisticUnitName(statistic.unit)) + " | " + Cell(statistic.help);
    for (const std::string_view part : statistic.parts) {
      page += (part == statistic.parts.front() ? " Parts: " : ", ") + Monospaced(part);
    }
    page += statistic.parts.empty() ? " |\n" : ". |\n";
  });
  return page;
}

std::string MemoryKindsText() {
  std::string names;
  for (size_t kind = 0; kind < kMemoryKinds; ++kind) {
    names += (kind == 0 ? "" : ", ") + Monospaced(MemoryKindName(static_cast<MemoryKind>(kind)));
  }
  return "One row for each kind: " + names + ". `docs/operations.md` says what each is.";
}

}  // namespace

std::string ReferencePage() {
  return "# Reference: options and statistics\n\n"
         "Made by `make reference` of the tables in `base/tables/runtime_options.cc`, "
         "`daemon/settings/config_options.cc`, `base/tables/statistics.h` and "
         "`protocol/server_stats.h`: "
         "change "
         "those, not this page. What options are for, and how they go together: "
         "[operations.md](operations.md).\n"
         "\n## Options\n\n"
         "The daemon takes an option as a key of its TOML file, in the section that its name "
         "begins with, or as a flag, which wins. Units are those of the bounds. Tables are written "
         "`{ team-a = 4096, team-b = 0 }` in the file and `team-a=4096,team-b=0` in a flag, lists "
         "`[\"none\", \"scan\"]` and `none,scan`.\n\n"
         "An embedded store takes the same options under the names in the column *embedded*: as "
         "members of `prefixd::RuntimeOptions` in C++, in `options_json` in C, as arguments of "
         "`prefixd.open` in Python. Sizes are in bytes there; where nothing else is said, bounds "
         "and units are the same. Options without such a name are the daemon's own.\n\n"
         "A value out of bounds, of the wrong type or under an unknown name is refused, with the "
         "option, the value and the bounds in the message. Options hold from the start of the "
         "daemon, or the opening of the store, to its end.\n" +
         OptionTables() +
         "\n## Statistics\n\n"
         "`prefixctl status` shows some of them, `prefixctl stats` all; both with `--json`. In "
         "Python they are `store.stats()` and `session.report()`, in C `pfx_stats` and "
         "`pfx_session_report`. A *counter* only grows, from the start of the process (of the "
         "session, in a ledger); a *gauge* says how things stand.\n" +
         StatisticTable<RuntimeStats>("`runtime`", "Of the store.") +
         StatisticTable<MemoryOfKind>("`runtime.memory_kinds`", MemoryKindsText()) +
         StatisticTable<MemoryOfTenant>("`runtime.memory_tenants`",
                                        "One row for each tenant that holds some.") +
         StatisticTable<TenantStats>("`runtime.tenants`", "One row for each tenant.") +
         StatisticTable<HostTierTenant>("`runtime.host_tenants`",
                                        "One row for each tenant that has read since the start.") +
         StatisticTable<wire::ServerStats>("`server`", "Of the daemon.") +
         StatisticTable<Ledger>("Ledger",
                                "Of a step, a session, or one layer and KV head of a session.");
}

}  // namespace prefixd::daemon
