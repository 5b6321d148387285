// Prints a daemon's statistics by their tables, for `prefixctl status` and `stats`.
#include <concepts>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "base/tables/statistics.h"
#include "prefixctl/commands/commands.h"
#include "prefixctl/show/output.h"
#include "protocol/codec.h"

namespace prefixd::ctl {
namespace {

template <typename T>
constexpr bool kIsList = false;
template <typename T>
constexpr bool kIsList<std::vector<T>> = true;

std::string ValueText(const auto& statistic, const std::string& value) {
  return statistic.kind == StatisticKind::kLabel ? "'" + value + "'" : value;
}
std::string ValueText(const auto& statistic, std::integral auto value) {
  switch (statistic.unit) {
    case StatisticUnit::kBytes:
      return Bytes(static_cast<uint64_t>(value));
    case StatisticUnit::kMilliseconds:
      return Duration(static_cast<uint64_t>(value));
    case StatisticUnit::kUnixMs:
      return value == 0 ? "-" : Time(static_cast<int64_t>(value)) + " UTC";
    default:
      return std::to_string(value);
  }
}

template <typename S>
void AddTitled(const S& stats, std::vector<std::pair<std::string, std::string>>* fields) {
  ForEachStatistic<S>([&](const auto& statistic) {
    if constexpr (!kIsList<std::remove_cvref_t<decltype(stats.*statistic.member)>>) {
      if (statistic.title.empty()) return;
      fields->emplace_back(statistic.title, ValueText(statistic, stats.*statistic.member));
    }
  });
}

template <typename S>
void AddAll(const std::string& part, const S& stats, std::vector<std::vector<std::string>>* rows) {
  ForEachStatistic<S>([&](const auto& statistic) {
    if constexpr (!kIsList<std::remove_cvref_t<decltype(stats.*statistic.member)>>) {
      rows->push_back({part + "." + std::string(statistic.name),
                       ValueText(statistic, stats.*statistic.member)});
    }
  });
}

template <typename S>
void PrintList(const std::string& name, const std::vector<S>& list) {
  if (list.empty()) return;
  std::vector<std::vector<std::string>> rows(1);
  ForEachStatistic<S>([&](const auto& statistic) { rows[0].emplace_back(statistic.name); });
  for (const S& item : list) {
    std::vector<std::string>& row = rows.emplace_back();
    ForEachStatistic<S>([&](const auto& statistic) {
      row.push_back(ValueText(statistic, item.*statistic.member));
    });
  }
  std::printf("\n%s\n", name.c_str());
  PrintTable(rows);
}

}  // namespace

Status ShowStatus(RemoteStore& client, const Options& options) {
  PREFIXD_ASSIGN(const wire::ServerStats server, client.Server());
  PREFIXD_ASSIGN(const RuntimeStats runtime, client.Stats());
  if (options.json) {
    PrintJson(
        {{"running", true}, {"server", wire::ToJson(server)}, {"runtime", wire::ToJson(runtime)}});
    return {};
  }
  std::vector<std::pair<std::string, std::string>> fields;
  AddTitled(server, &fields);
  AddTitled(runtime, &fields);
  PrintFields(fields);
  ForEachStatistic<RuntimeStats>([&](const auto& statistic) {
    if constexpr (kIsList<std::remove_cvref_t<decltype(runtime.*statistic.member)>>) {
      if (statistic.title.empty()) return;
      PrintList(std::string(statistic.title), runtime.*statistic.member);
    }
  });
  return {};
}

Status ShowStats(RemoteStore& client, const Options& options) {
  PREFIXD_ASSIGN(const wire::ServerStats server, client.Server());
  PREFIXD_ASSIGN(const RuntimeStats runtime, client.Stats());
  if (options.json) {
    PrintJson({{"server", wire::ToJson(server)}, {"runtime", wire::ToJson(runtime)}});
    return {};
  }
  std::vector<std::vector<std::string>> rows = {{"counter", "value"}};
  AddAll("runtime", runtime, &rows);
  AddAll("server", server, &rows);
  PrintTable(rows);
  ForEachStatistic<RuntimeStats>([&](const auto& statistic) {
    if constexpr (kIsList<std::remove_cvref_t<decltype(runtime.*statistic.member)>>) {
      PrintList(std::string(statistic.name), runtime.*statistic.member);
    }
  });
  return {};
}

}  // namespace prefixd::ctl
