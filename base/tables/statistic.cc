#include "base/tables/statistic.h"

namespace prefixd {

std::string_view StatisticKindName(StatisticKind kind) {
  switch (kind) {
    case StatisticKind::kCounter:
      return "counter";
    case StatisticKind::kGauge:
      return "gauge";
    case StatisticKind::kText:
      return "text";
    case StatisticKind::kLabel:
      return "label";
    case StatisticKind::kList:
      return "list";
  }
  return "?";
}

std::string_view StatisticUnitName(StatisticUnit unit) {
  switch (unit) {
    case StatisticUnit::kNone:
      return "";
    case StatisticUnit::kBytes:
      return "bytes";
    case StatisticUnit::kTokens:
      return "tokens";
    case StatisticUnit::kMilliseconds:
      return "milliseconds";
    case StatisticUnit::kNanoseconds:
      return "nanoseconds";
    case StatisticUnit::kUnixMs:
      return "milliseconds since 1970";
  }
  return "?";
}

}  // namespace prefixd
