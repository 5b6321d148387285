// Prints named figures of a benchmark as a table while it runs, and writes JSON at the end. It
// needs only the standard library.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

#include "measure/timing/run_facts.h"
#include "measure/timing/statistics.h"

namespace prefixd::bench {

class Figures {
 public:
  // Adds a line of the table and a member of "values": median, low and high (quartiles).
  void Add(const std::string& name, const char* unit, double divisor, Spread value,
           const std::string& remark = "") {
    std::printf("  %-44s %10.3f %-5s (%.3f .. %.3f)  %s\n", name.c_str(), value.median / divisor,
                unit, value.low / divisor, value.high / divisor, remark.c_str());
    std::fflush(stdout);
    values_.push_back(
        {name + "_" + unit, value.median / divisor, value.low / divisor, value.high / divisor});
  }
  void AddRatio(const std::string& name, double value) {
    std::printf("  %-44s %10.3f\n", name.c_str(), value);
    ratios_.push_back({name, value, value, value});
  }
  // Records what was left out, and why.
  void Skip(const std::string& what) {
    std::printf("  skipped: %s\n", what.c_str());
    skipped_.push_back(what);
  }

  // Returns false when the file cannot be written. `device` is the device's name, or empty without
  // one.
  bool Write(const std::string& file, const std::string& benchmark,
             const std::string& device) const {
    std::FILE* out = std::fopen(file.c_str(), "w");
    if (!out) return false;
    std::fprintf(out, "{\n  \"run\": %s,\n  \"benchmark\": %s,\n  \"device\": %s,\n",
                 RunFactsJson().c_str(), QuotedJson(benchmark).c_str(),
                 device.empty() ? "null" : QuotedJson(device).c_str());
    std::fprintf(out, "  \"values\": {");
    for (size_t i = 0; i < values_.size(); ++i) {
      const Line& v = values_[i];
      std::fprintf(out, "%s\n    %s: {\"median\": %.9g, \"low\": %.9g, \"high\": %.9g}",
                   i ? "," : "", QuotedJson(v.name).c_str(), v.median, v.low, v.high);
    }
    std::fprintf(out, "\n  },\n  \"ratios\": {");
    for (size_t i = 0; i < ratios_.size(); ++i) {
      std::fprintf(out, "%s\n    %s: %.6g", i ? "," : "", QuotedJson(ratios_[i].name).c_str(),
                   ratios_[i].median);
    }
    std::fprintf(out, "\n  },\n  \"skipped\": [");
    for (size_t i = 0; i < skipped_.size(); ++i) {
      std::fprintf(out, "%s%s", i ? ", " : "", QuotedJson(skipped_[i]).c_str());
    }
    std::fprintf(out, "]\n}\n");
    return std::fclose(out) == 0;
  }

 private:
  struct Line {
    std::string name;
    double median, low, high;
  };

  std::vector<Line> values_, ratios_;
  std::vector<std::string> skipped_;
};

}  // namespace prefixd::bench
