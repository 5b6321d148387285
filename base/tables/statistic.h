// Describes one statistic: its name, its member, its kind, its unit and its help. All code that
// adds, sends or shows statistics uses tables of them (base/tables/statistics.h), so that a counter
// is declared once.
//
// Thread-safety: constants.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <tuple>

namespace prefixd {

enum class StatisticKind : uint8_t {
  kCounter,  // only grows, from the start of the process or of the session
  kGauge,    // the present value; may fall
  kText,     // the present state, as a text
  kLabel,    // a text that tells the entries of a list apart
  kList,     // a list of structs that have a table of their own
};
std::string_view StatisticKindName(StatisticKind kind);  // "counter"

enum class StatisticUnit : uint8_t { kNone, kBytes, kTokens, kMilliseconds, kNanoseconds, kUnixMs };
std::string_view StatisticUnitName(StatisticUnit unit);  // "bytes"; "" for kNone

// `Member`: an integer, a double, a string, a std::vector of structs, or a std::array with a name
// for each of its elements (`parts`).
template <typename S, typename Member>
struct Statistic {
  std::string_view name;  // the member's: "bytes_on_disk"
  Member S::*member;
  StatisticKind kind;
  StatisticUnit unit;
  std::string_view help;
  std::string_view title = {};  // in `prefixctl status`; empty: not shown there
  std::span<const std::string_view> parts = {};
  std::string_view part = {};  // the property that tells the parts apart: "tier"

  constexpr Statistic Titled(std::string_view text) const {
    Statistic titled = *this;
    titled.title = text;
    return titled;
  }
  constexpr Statistic By(std::string_view what, std::span<const std::string_view> names) const {
    Statistic divided = *this;
    divided.part = what, divided.parts = names;
    return divided;
  }
};

template <typename S, typename Member>
constexpr auto Counter(std::string_view name, Member S::*member, StatisticUnit unit,
                       std::string_view help) {
  return Statistic<S, Member>{name, member, StatisticKind::kCounter, unit, help};
}
template <typename S, typename Member>
constexpr auto Gauge(std::string_view name, Member S::*member, StatisticUnit unit,
                     std::string_view help) {
  return Statistic<S, Member>{name, member, StatisticKind::kGauge, unit, help};
}
template <typename S, typename Member>
constexpr auto Word(std::string_view name, Member S::*member, std::string_view help,
                    StatisticKind kind = StatisticKind::kText) {
  return Statistic<S, Member>{name, member, kind, StatisticUnit::kNone, help};
}

// The table of S: a tuple of Statistic, one for each member of S.
template <typename S>
inline constexpr std::tuple<> kStatistics;

template <typename S>
concept HasStatistics = std::tuple_size_v<std::remove_const_t<decltype(kStatistics<S>)>> >
0;

template <HasStatistics S, typename F>
constexpr void ForEachStatistic(F&& f) {
  std::apply([&](const auto&... statistic) { (f(statistic), ...); }, kStatistics<S>);
}

}  // namespace prefixd
