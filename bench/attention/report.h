// Collects what the attention bench found: prints a table while it runs, writes JSON at the end.
#pragma once

#include <string>
#include <vector>

#include "measure/timing/statistics.h"

namespace prefixd::bench {

class Report {
 public:
  void Fact(const std::string& name, const std::string& json) { facts_.push_back({name, json}); }
  // Records the median and quartiles of the rounds.
  void Value(const std::string& name, const std::vector<double>& samples);
  void Ratio(const std::string& name, const std::vector<double>& samples);
  void PrintRatios() const;
  bool WriteJson(const std::string& path) const;  // false when the file cannot be written

 private:
  struct Named {
    std::string name;
    Spread spread;
  };
  struct Text {
    std::string name, json;
  };
  std::vector<Text> facts_;
  std::vector<Named> values_, ratios_;
};

}  // namespace prefixd::bench
