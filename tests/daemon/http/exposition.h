// Reads the text format of Prometheus, and says what breaks its rules.
#pragma once

#include <cmath>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/test.h"

namespace prefixd::testing {

struct Exposition {
  std::map<std::string, double> values;      // by name and labels, as they stand there
  std::map<std::string, std::string> types;  // by family
  std::vector<std::string> wrong;

  double Of(const std::string& series) const {
    const auto it = values.find(series);
    EXPECT_NE(it, values.end()) << series;
    return it == values.end() ? NAN : it->second;
  }
  bool Has(const std::string& family) const { return types.contains(family); }
};

inline Exposition ParseExposition(const std::string& text) {
  Exposition e;
  static const std::regex kName("[a-zA-Z_:][a-zA-Z0-9_:]*");
  static const std::regex kLabels(
      R"(\{([a-zA-Z_][a-zA-Z0-9_]*="(\\[\\n"]|[^\\"\n])*"(,[a-zA-Z_][a-zA-Z0-9_]*="(\\[\\n"]|[^\\"\n])*")*)?\})");
  std::istringstream lines(text);
  std::string family;
  std::map<std::string, std::vector<double>> buckets;  // of a histogram's series, as they come
  for (std::string line; std::getline(lines, line);) {
    const auto wrong = [&](const std::string& why) { e.wrong.push_back(why + ": " + line); };
    if (line.empty()) continue;
    if (line.starts_with("# HELP ")) {
      family = line.substr(7, line.find(' ', 7) - 7);
      if (!std::regex_match(family, kName)) wrong("name");
      continue;
    }
    if (line.starts_with("# TYPE ")) {
      const size_t space = line.find(' ', 7);
      const std::string name = line.substr(7, space - 7);
      if (name != family && line.size() > space) family = name;
      if (!e.types.emplace(name, line.substr(space + 1)).second) wrong("a family stands twice");
      continue;
    }
    const size_t brace = line.find('{'), end = line.rfind(' ');
    const std::string series = line.substr(0, end);
    std::string name = series.substr(0, std::min(brace, series.size()));
    if (!std::regex_match(name, kName)) wrong("name");
    if (brace < end && !std::regex_match(series.substr(brace), kLabels)) wrong("labels");
    char* stop = nullptr;
    const double value = std::strtod(line.c_str() + end + 1, &stop);
    if (*stop != '\0') wrong("value");
    if (!e.values.emplace(series, value).second) wrong("a series stands twice");
    const std::string type = e.types.contains(family) ? e.types[family] : "";
    if (type == "histogram") {
      if (name == family + "_bucket") {
        const std::string of = std::regex_replace(series, std::regex(",?le=\"[^\"]*\""), "");
        auto& counts = buckets[of];
        if (!counts.empty() && counts.back() > value) wrong("buckets must grow");
        counts.push_back(value);
      } else if (name != family + "_sum" && name != family + "_count") {
        wrong("not of its family");
      }
    } else if (name != family) {
      wrong("not of its family");
    }
    if (type == "counter" && !name.ends_with("_total")) wrong("a counter's name");
    if (type == "counter" && !(value >= 0)) wrong("a counter's value");
  }
  for (const auto& [series, counts] : buckets) {
    std::string count = series;
    count.replace(count.find("_bucket"), 7, "_count");
    if (e.values.at(count) != counts.back()) e.wrong.push_back("count of " + series);
  }
  return e;
}

}  // namespace prefixd::testing
